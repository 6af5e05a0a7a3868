"""Tensors by name, their weighted sums, and their safetensors files."""

import pytest
import torch
from helpers import same
from safetensors import safe_open
from safetensors.torch import load_file

from contrafed.core import weighted_sum as combining
from contrafed.core.tensors import ALIGNMENT_BYTES, TYPES, align, read, size_of, write
from contrafed.core.weighted_sum import weighted_sum


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_library_reads_what_is_written(tmp_path, dtype):
    values = torch.arange(-6, 6).view(3, 4).to(dtype)
    tensors = {
        "plain": values,
        "transposed": values.T,
        "part": values[:, 1:3],
        "again": values,  # the same memory twice
        "seen often": values[:1].expand(5, 4),
        "scalar": values[0, 0],
        "empty": values[:0],
        "trained": torch.ones(3, requires_grad=True),
    }
    write(tmp_path / "file.safetensors", tensors, {"client": "7"})
    found = load_file(tmp_path / "file.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)
    with safe_open(tmp_path / "file.safetensors", "pt") as file:
        assert file.metadata() == {"client": "7"}


def test_values_of_every_width_are_aligned(tmp_path):
    """Narrow tensors follow wide ones for any names, so that a reader may map the file."""
    tensors = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(5), "c": torch.ones(1, dtype=torch.float64)}
    write(tmp_path / "file.safetensors", tensors)
    content = (tmp_path / "file.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    assert begin % 8 == 0
    assert len(content) - begin == size_of(tensors)
    assert content[begin : begin + 8] == b"\0\0\0\0\0\0\xf0\x3f"  # 1.0 in double precision
    assert content[-3:] == b"\1\1\1"


def test_a_tensor_is_copied_only_if_it_begins_elsewhere_than_a_new_one():
    whole = torch.arange(40.0)
    assert align(whole) is whole
    part = align(whole[1:])
    assert part.data_ptr() % ALIGNMENT_BYTES == 0
    assert torch.equal(part, whole[1:])


def test_what_is_read_is_in_the_order_in_which_it_was_written(tmp_path):
    """The library returns wide tensors first, and each width by name."""
    tensors = {"b": torch.ones(1), "c": torch.ones(1, dtype=torch.bool), "a": torch.ones(1), "d": torch.ones(1).double()}
    for given in (tensors, dict(reversed(tensors.items()))):
        write(tmp_path / "file.safetensors", given, {"client": "7"})
        assert list(read(tmp_path / "file.safetensors")) == list(given)
        assert same(read(tmp_path / "file.safetensors"), given)


def test_no_tensors_make_a_file_too(tmp_path):
    write(tmp_path / "file.safetensors", {})
    assert load_file(tmp_path / "file.safetensors") == read(tmp_path / "file.safetensors") == {}


def test_a_shorter_file_over_a_longer_one_is_whole(tmp_path):
    path = tmp_path / "file.safetensors"
    write(path, {"a": torch.ones(1000), "b": torch.zeros(1000)})
    write(path, {"a": torch.ones(10)})
    found = load_file(path)
    assert list(found) == ["a"]
    assert torch.equal(found["a"], torch.ones(10))


def models_and_factors(count):
    """Return models of odd sizes and layouts, and their sum by single additions, with torch's rounding."""
    rng = torch.Generator().manual_seed(count)
    models = [
        {
            "long": torch.randn(103, generator=rng),
            "turned": torch.randn(7, 5, generator=rng).T,
            "scalar": torch.randn((), generator=rng),
            "empty": torch.empty(0),
            "double": torch.randn(9, generator=rng, dtype=torch.float64),
            "mixed": torch.randn(9, generator=rng).to(torch.float64 if k == 1 else torch.float32),
        }
        for k in range(count)
    ]
    factors = torch.randn(count, generator=rng, dtype=torch.float64).tolist()
    expected = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in models[0].items()}
    for model, factor in zip(models, factors, strict=True):
        for name, total in expected.items():
            total.add_(model[name], alpha=factor)
    return models, factors, expected


@pytest.fixture
def large(monkeypatch):
    """Treat small models as large ones: they are added in blocks, by three threads."""
    monkeypatch.setattr("contrafed.core.weighted_sum.BLOCK_NUMBERS", 8)
    monkeypatch.setattr("contrafed.core.weighted_sum.MIN_THREADED_NUMBERS", 100)
    monkeypatch.setattr("contrafed.core.weighted_sum.cores", lambda: 3)


@pytest.mark.parametrize("count", [1, 2, 8, 9, 21])
def test_a_sum_in_blocks_and_threads_is_the_plain_sum_bit_for_bit(large, monkeypatch, count):
    add, sizes = combining._add, []
    monkeypatch.setattr("contrafed.core.weighted_sum._add", lambda *given: (sizes.append(given[0].numel()), add(*given)))
    models, factors, expected = models_and_factors(count)
    assert same(weighted_sum(models, factors), expected)
    assert len(sizes) == 13 + 5 + 1 + 2 + 2  # blocks of "long", "turned", "scalar", "double" and "mixed"
    assert max(sizes) == 8


def test_a_small_model_is_added_without_threads(monkeypatch):
    monkeypatch.setattr("contrafed.core.weighted_sum.ThreadPoolExecutor", None)
    models, factors, expected = models_and_factors(3)
    assert same(weighted_sum(models, factors), expected)


def test_models_and_factors_must_be_as_many():
    with pytest.raises(ValueError, match="no models"):
        weighted_sum([], [])
    with pytest.raises(ValueError, match="1 factors for 2 models"):
        weighted_sum([{"w": torch.ones(2)}] * 2, [1.0])
