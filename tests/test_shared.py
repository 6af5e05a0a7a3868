"""Memory that a worker and the driver share: nothing is overwritten that somebody still reads."""

import os

import numpy as np
import pytest
import torch

from contrafed.codec import from_record, to_record
from simulation import shared

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd")


def reply(value, size=1000):
    return to_record({"a": torch.full((size,), float(value)), "b": torch.arange(3)})


def round_trip(pool, value, mapped):
    """What one batch does: take a block, write to it as the worker, read as the driver."""
    block = pool.take()
    how, body, extent = shared.write(value, None if block is None else block.address, mapped)
    if how == "shared":
        return how, block.read(body, extent, lambda: pool.give_back(block))
    pool.wanted = max(pool.wanted, extent)
    if block is not None:
        pool.give_back(block)
    return how, body


def test_the_first_batch_tells_the_size_and_the_next_use_the_same_memory():
    pool, mapped = shared.Pool(10**6), {}
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
    pool, mapped = shared.Pool(10**6), {}
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
    pool, mapped = shared.Pool(10**6), {}
    round_trip(pool, reply(0, 10), mapped)
    assert round_trip(pool, reply(1, 10), mapped)[0] == "shared"
    assert round_trip(pool, reply(2, 5000), mapped)[0] == "whole"
    how, got = round_trip(pool, reply(3, 5000), mapped)
    assert how == "shared"
    assert len(pool.blocks) == 1
    assert float(from_record(got)["a"].sum()) == 15000
    pool.close()


def test_the_limit_holds_and_no_block_is_no_failure():
    pool, mapped = shared.Pool(100), {}
    for value in range(3):
        how, got = round_trip(pool, reply(value), mapped)
        assert how == "whole"
        assert float(from_record(got)["a"][0]) == value
    assert not pool.blocks


def test_a_dropped_block_is_never_used_again():
    pool, mapped = shared.Pool(10**6), {}
    round_trip(pool, reply(0), mapped)
    block = pool.take()
    pool.drop(block)
    pool.give_back(block)
    assert not pool.free
    assert pool.take() is not block
    pool.close()


def test_memory_out_of_reach_means_the_ordinary_way(tmp_path):
    block = shared.Block(10**5)
    path, name, size = block.address
    other = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)  # what a number may mean on another machine
    os.ftruncate(other, size)
    for elsewhere in (f"/proc/{os.getpid()}/fd/999999", f"/proc/{os.getpid()}/fd/{other}"):
        assert shared.write(reply(1), (elsewhere, name, size), {})[0] == "whole"
    os.close(other)
    assert (tmp_path / "file").read_bytes() == bytes(size)
    assert shared.write(reply(1), (path, name, size), {})[0] == "shared"
    block.close()


def test_few_blocks_stay_mapped():
    mapped, blocks = {}, [shared.Block(10**5) for _ in range(shared.MAPPED + 3)]
    for block in blocks:
        assert shared.write(reply(1), block.address, mapped)[0] == "shared"
        block.close()
    assert len(mapped) == shared.MAPPED


def test_what_is_read_cannot_be_written_to():
    pool, mapped = shared.Pool(10**6), {}
    round_trip(pool, np.zeros(5000), mapped)
    _, got = round_trip(pool, np.ones(5000), mapped)
    with pytest.raises(ValueError, match="read-only"):
        got[0] = 2
    pool.close()
