"""FedPer: with nothing but a head it is Local, and the head is never sent."""

import pytest
from hand import whole


@pytest.mark.parametrize("head", ["classifier", "projector_classifier"])
def test_the_head_stays_and_the_rest_travels(head):
    stays = set(head.split("_"))
    _, memory, strategy = whole("fedper", [[0]], head=head)
    parts = {n.partition("/")[2].partition(".")[0] for n in strategy.upload_spec}
    assert parts == {"encoder", "projector", "classifier"} - stays
    assert {n.split("/")[-1].partition(".")[0] for n in memory} == stays


@pytest.mark.parametrize(
    ("name", "changes", "projector"),
    [("fedper", {}, True), ("fedrep", {}, True), ("fedbabu", {}, True), ("fedbabu", {"head": "projector_classifier"}, False),
     ("fedcrl", {}, True), ("mpfedcon", {}, False)],
)  # fmt: skip
def test_no_head_ever_travels(name, changes, projector):
    _, _, strategy = whole(name, [[]], **changes)
    assert not any("classifier" in n for n in (*strategy.broadcast_spec, *strategy.upload_spec))
    assert any("projector" in n for n in strategy.upload_spec) == projector
