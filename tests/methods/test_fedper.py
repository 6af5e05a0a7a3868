"""FedPer: with nothing but a head it is Local, and the head is never sent."""

import pytest
from hand import LOCAL, golden_memory, no_head_travels, whole


def test_with_everything_in_the_head_it_is_local():
    memory = golden_memory("fedper", [[0, 1, 2]] * 3)
    assert [float(memory[client]["personal/classifier.w"][0]) for client in range(3)] == pytest.approx(LOCAL, abs=1e-5)


def test_no_head_ever_travels():
    assert no_head_travels("fedper")


@pytest.mark.parametrize("head", ["classifier", "projector_classifier"])
def test_the_head_stays_and_the_rest_travels(head):
    stays = set(head.split("_"))
    _, memory, strategy = whole("fedper", [[0]], head=head)
    parts = {n.partition("/")[2].partition(".")[0] for n in strategy.upload_spec}
    assert parts == {"encoder", "projector", "classifier"} - stays
    assert {n.split("/")[-1].partition(".")[0] for n in memory} == stays
