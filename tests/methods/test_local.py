"""Local: by hand, and its clients are independent."""

import pytest
import torch
from hand import LOCAL, golden_memory, whole


def test_golden_values_with_absences():
    """A client does not change in a round of its absence: 0 trains twice, 1 three times, 2 never."""
    memory = golden_memory("local", [[0, 1], [1], [], [0, 1]])
    values = {client: float(own["personal/classifier.w"][0]) for client, own in memory.items()}
    assert values == pytest.approx({0: 2 * 0.9**4, 1: LOCAL[1]}, abs=1e-5)


def test_local_clients_know_nothing_of_each_other():
    """Client 1's model does not depend on the other participants, and nothing is sent."""
    _, alone, strategy = whole("local", [[1]] * 3)
    _, together, _ = whole("local", [range(8)] * 3)
    assert all(torch.equal(v, together[n]) for n, v in alone.items())
    assert strategy.broadcast_spec == strategy.upload_spec == {}
    assert strategy.round.bytes_up == strategy.round.bytes_down == 0
