"""A strategy's state from round to round: packed for a checkpoint, restored, and moved between devices."""

import json

import numpy as np
import pytest
import torch

from contrafed.core.tensors import move
from contrafed.runs import checkpoint


def test_state_survives_packing():
    state = {
        "array": np.arange(3),
        "scalar": np.float64(2.5).item(),
        "nested": {"list": [{"w": torch.ones(2)}, {"w": torch.zeros(2)}], "none": None, "text": np.str_("a/b")},
        "empty": {"list": [], "dict": {}},
        "by client": {3: {"w": torch.full((2,), 3.0)}, 10: {"w": torch.zeros(2)}, "3": 5, np.int64(4): 1},
        "a": {"b": torch.ones(1)},
        "a/b": torch.zeros(1),
    }
    tensors = {}
    packed = json.loads(json.dumps(checkpoint.pack(state, "state", tensors)))
    again = checkpoint.unpack(packed, tensors)
    assert again["array"].tolist() == [0, 1, 2]
    again["array"] += 1  # a separate array
    assert state["array"].tolist() == [0, 1, 2]
    assert again["nested"]["list"][0]["w"].tolist() == [1, 1]
    assert (again["scalar"], again["nested"]["none"], again["nested"]["text"]) == (2.5, None, "a/b")
    assert again["empty"] == {"list": [], "dict": {}}
    assert list(again["by client"]) == [3, 10, "3", 4]
    assert all(type(key) is int for key in again["by client"] if key != "3")
    assert (again["by client"][3]["w"].tolist(), again["by client"]["3"]) == ([3, 3], 5)
    assert (again["a"]["b"].tolist(), again["a/b"].tolist()) == ([1], [0])
    with pytest.raises(TypeError, match="cannot hold object"):
        checkpoint.pack({"x": object()}, "state", {})
    with pytest.raises(TypeError, match="keys are text or whole numbers, not 1.5"):
        checkpoint.pack({1.5: 0}, "state", {})


@pytest.mark.parametrize("value", [(1, (2.5, "x")), np.float32(0.1), np.int8(3), np.bool_(True), np.float64(0.1)], ids=repr)
def test_a_state_comes_back_with_its_types(value):
    tensors = {}
    again = checkpoint.unpack(json.loads(json.dumps(checkpoint.pack({"x": [value]}, "state", tensors))), tensors)["x"][0]
    assert (again, type(again)) == (value, type(value))


def test_tables_of_the_state_stay_those_that_a_rule_holds():
    """Also after a move to a GPU, or back from a checkpoint."""
    table = {3: torch.ones(1)}
    state = {"groups": {"first": table, "list": [{"w": torch.ones(2)}]}, "count": 1}
    move(state, torch.device("meta"))
    assert table is state["groups"]["first"]
    assert table[3].is_meta
    assert state["groups"]["list"][0]["w"].is_meta
    checkpoint.put_back(state, {"groups": {"first": {4: torch.zeros(1)}, "list": []}, "count": 2})
    assert table is state["groups"]["first"]
    assert table == {4: torch.zeros(1)}
    assert (state["groups"]["list"], state["count"]) == ([], 2)
