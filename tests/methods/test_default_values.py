"""Every YAML of a method or a strategy says where its values are from."""

import pytest
from omegaconf import OmegaConf

from contrafed.core.registry import CONF

FILES = [path for folder in ("strategy", "strategy/server") for path in sorted((CONF / folder).glob("[!_]*.yaml"))]


def has_number(value):
    if isinstance(value, dict):
        return any(map(has_number, value.values()))
    return isinstance(value, int | float) and not isinstance(value, bool)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_with_numbers_names_their_source_in_its_second_comment(path):
    values = OmegaConf.to_container(OmegaConf.load(path))
    comments = [line for line in path.read_text(encoding="utf-8").splitlines()[:3] if line.startswith("# Values: ")]
    assert bool(comments) == has_number(values)
