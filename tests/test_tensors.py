"""Tensors by name, and the safetensors files they are written to."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from contrafed.tensors import TYPES, size_of, write


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
    write(tmp_path / "file.safetensors", tensors, {"node": "7"})
    found = load_file(tmp_path / "file.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)
    with safe_open(tmp_path / "file.safetensors", "pt") as file:
        assert file.metadata() == {"node": "7"}


def test_values_of_every_width_are_aligned(tmp_path):
    """Narrow tensors come after wide ones, whatever their names: a reader may map the file."""
    tensors = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(5), "c": torch.ones(1, dtype=torch.float64)}
    write(tmp_path / "file.safetensors", tensors)
    content = (tmp_path / "file.safetensors").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    assert begin % 8 == 0
    assert len(content) - begin == size_of(tensors)
    assert content[begin : begin + 8] == b"\0\0\0\0\0\0\xf0\x3f"  # 1.0 in double precision
    assert content[-3:] == b"\1\1\1"


def test_no_tensors_make_a_file_too(tmp_path):
    write(tmp_path / "file.safetensors", {})
    assert load_file(tmp_path / "file.safetensors") == {}


def test_a_shorter_file_over_a_longer_one_is_whole(tmp_path):
    path = tmp_path / "file.safetensors"
    write(path, {"a": torch.ones(1000), "b": torch.zeros(1000)})
    write(path, {"a": torch.ones(10)})
    found = load_file(path)
    assert list(found) == ["a"]
    assert torch.equal(found["a"], torch.ones(10))
