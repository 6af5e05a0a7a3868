"""Memory that a worker and the driver share: data in use are never overwritten."""

import os

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from contrafed.core.codec import from_record, to_record
from contrafed.engines import shared_memory

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd")


def reply(value, size=1000):
    return to_record({"a": torch.full((size,), float(value)), "b": torch.arange(3)})


def round_trip(pool, value, mapped):
    """Simulate one batch: take a block, write to it as the worker, and read as the driver."""
    block = pool.take(1)
    how, body, extent = shared_memory.write(value, None if block is None else block.address, mapped)
    if how == "shared":
        return how, block.read(body, extent, lambda: pool.give_back(block))
    pool.wanted = max(pool.wanted, extent)
    if block is not None:
        pool.give_back(block)
    return how, body


def test_the_first_batch_tells_the_size_and_the_next_use_the_same_memory():
    pool, mapped = shared_memory.Pool(10**6), {}
    assert round_trip(pool, reply(0), mapped)[0] == "whole"
    for value in range(1, 5):
        how, got = round_trip(pool, reply(value), mapped)
        tensors = from_record(got)
        assert how == "shared"
        assert torch.equal(tensors["a"], torch.full((1000,), float(value)))
        assert torch.equal(tensors["b"], torch.arange(3))
        del got, tensors
    assert len(pool.blocks) == len(pool.free) == len(mapped) == 1
    pool.close()


def test_what_is_still_read_is_not_overwritten():
    pool, mapped = shared_memory.Pool(10**6), {}
    round_trip(pool, reply(0), mapped)
    kept = from_record(round_trip(pool, reply(1), mapped)[1])["a"]  # one tensor of a reply, as a strategy might keep it
    for value in (2, 3):
        assert float(from_record(round_trip(pool, reply(value), mapped)[1])["a"][0]) == value
    assert len(pool.blocks) == 2
    assert torch.equal(kept, torch.full((1000,), 1.0))
    pool.close()
    assert torch.equal(kept, torch.full((1000,), 1.0))
    assert not pool.blocks


def test_larger_replies_get_a_larger_block():
    pool, mapped = shared_memory.Pool(10**6), {}
    round_trip(pool, reply(0, 10), mapped)
    assert round_trip(pool, reply(1, 10), mapped)[0] == "shared"
    assert round_trip(pool, reply(2, 5000), mapped)[0] == "whole"
    how, got = round_trip(pool, reply(3, 5000), mapped)
    assert how == "shared"
    assert len(pool.blocks) == 1
    assert float(from_record(got)["a"].sum()) == 15000
    pool.close()


def test_the_limit_holds_and_no_block_is_no_failure():
    pool, mapped = shared_memory.Pool(100), {}
    for value in range(3):
        how, got = round_trip(pool, reply(value), mapped)
        assert how == "whole"
        assert float(from_record(got)["a"][0]) == value
    assert not pool.blocks


def test_a_dropped_block_is_never_used_again():
    pool, mapped = shared_memory.Pool(10**6), {}
    round_trip(pool, reply(0), mapped)
    block = pool.take(1)
    pool.drop(block)
    pool.give_back(block)
    assert not pool.free
    assert pool.take(1) is not block
    pool.close()


def test_memory_out_of_reach_means_the_ordinary_way(tmp_path):
    block = shared_memory.Block(10**5)
    path, name, size = block.address
    other = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)  # what a number may mean on another machine
    os.ftruncate(other, size)
    for elsewhere in (f"/proc/{os.getpid()}/fd/999999", f"/proc/{os.getpid()}/fd/{other}"):
        assert shared_memory.write(reply(1), (elsewhere, name, size), {})[0] == "whole"
    os.close(other)
    assert (tmp_path / "file").read_bytes() == bytes(size)
    assert shared_memory.write(reply(1), (path, name, size), {})[0] == "shared"
    block.close()


def test_few_blocks_stay_mapped():
    mapped, blocks = {}, [shared_memory.Block(10**5) for _ in range(shared_memory.MAX_MAPPED_BLOCKS + 3)]
    for block in blocks:
        assert shared_memory.write(reply(1), block.address, mapped)[0] == "shared"
        block.close()
    assert len(mapped) == shared_memory.MAX_MAPPED_BLOCKS


def test_what_is_read_cannot_be_written_to():
    pool, mapped = shared_memory.Pool(10**6), {}
    round_trip(pool, np.zeros(5000), mapped)
    _, got = round_trip(pool, np.ones(5000), mapped)
    with pytest.raises(ValueError, match="read-only"):
        got[0] = 2
    pool.close()


def test_a_broadcast_is_read_by_all_and_the_next_uses_the_same_memory():
    broadcast, workers = shared_memory.Broadcast(10**6), [{}, {}]
    names = set()
    for value in range(4):
        handle = broadcast.write([reply(value), reply(-value)])
        names.add(handle.address[1])
        for mapped in workers:
            (first, second), still_read = shared_memory.read(handle, mapped)
            assert torch.equal(from_record(first)["a"], torch.full((1000,), float(value)))
            assert torch.equal(from_record(second)["a"], torch.full((1000,), -float(value)))
            assert still_read()
            del first, second
            assert not still_read()
    assert len(names) == 1
    broadcast.close()


def test_a_tensor_that_is_kept_is_noticed_and_survives_the_next_broadcast():
    broadcast, mapped = shared_memory.Broadcast(10**6), {}
    record, still_read = shared_memory.read(broadcast.write(reply(1)), mapped)
    kept = from_record(record)["a"]
    del record
    assert still_read()
    broadcast.renew()
    again, _ = shared_memory.read(broadcast.write(reply(2)), mapped)
    assert float(kept.sum()) == 1000
    assert float(from_record(again)["a"].sum()) == 2000
    assert len(mapped) == 1  # of broadcasts that are over none stays mapped
    broadcast.close()


def test_a_broadcast_grows_up_to_the_limit():
    broadcast, mapped = shared_memory.Broadcast(10**5), {}
    for size in (10, 20_000, 10):
        record, _ = shared_memory.read(broadcast.write(reply(1, size)), mapped)
        assert float(from_record(record)["a"].sum()) == size
    assert broadcast.block.size == 80_064
    assert broadcast.write(reply(1, 30_000)) is None
    broadcast.close()
    assert broadcast.address is None


def test_without_such_memory_nothing_is_broadcast_in_it():
    broadcast = shared_memory.Broadcast(0)
    assert broadcast.address is None
    assert broadcast.write(reply(1)) is None
    assert not shared_memory.reachable(broadcast.address)
    broadcast.renew()
    broadcast.close()


def test_who_is_on_this_machine_is_told_by_the_block():
    block = shared_memory.Block(100)
    path, name, size = block.address
    assert shared_memory.reachable((path, name, size))
    assert not shared_memory.reachable((path, "contrafed-of-another-machine", size))
    with pytest.raises(OSError, match="out of reach"):
        shared_memory.read(shared_memory.BroadcastHandle((path, "contrafed-of-another-machine", size), b"", []), {})
    block.close()


def test_every_kind_of_tensor_arrives():
    tensors = {
        "scalar": torch.tensor(7), "empty": torch.zeros(0, 3), "transposed": torch.arange(6.0).view(2, 3).T,
        "row": torch.arange(6, dtype=torch.uint8).view(2, 3)[1], "double": torch.full((2, 2), 0.1, dtype=torch.float64),
        "mask": torch.tensor([True, False]), "learns": torch.ones(3, requires_grad=True),
    }  # fmt: skip
    broadcast, mapped = shared_memory.Broadcast(10**6), {}
    record, _ = shared_memory.read(broadcast.write(to_record(tensors)), mapped)
    got = from_record(record)
    assert list(got) == list(tensors)
    for name, value in tensors.items():
        assert got[name].dtype == value.dtype
        assert torch.equal(got[name], value.detach())
    broadcast.close()


def test_a_record_of_flowers_own_arrays_arrives():
    record = ArrayRecord([np.arange(3.0), np.zeros((2, 2))])
    broadcast, mapped = shared_memory.Broadcast(10**6), {}
    got, _ = shared_memory.read(broadcast.write(record), mapped)
    assert all(np.array_equal(got[name].numpy(), record[name].numpy()) for name in record)
    assert type(got) is ArrayRecord
    broadcast.close()
