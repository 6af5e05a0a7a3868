"""LG-FedAvg: FedPer's complement. With nothing but a classifier it is FedAvg."""

import pytest
from hand import whole
from helpers import FULL_COHORTS, PATTERN, run_scalar


def test_with_everything_in_the_classifier_it_is_fedavg():
    for rounds in (FULL_COHORTS, PATTERN):
        assert run_scalar("lgfedavg", rounds) == pytest.approx(run_scalar("fedavg", rounds), rel=1e-12)


@pytest.mark.parametrize("head", ["classifier", "projector_classifier"])
def test_fedper_and_lgfedavg_share_complements(head):
    _, _, fedper = whole("fedper", [[]], head=head)
    _, _, lg = whole("lgfedavg", [[]], head=head)
    assert {n.removeprefix("model/").partition(".")[0] for n in lg.broadcast_spec} == set(head.split("_"))
    assert not set(fedper.broadcast_spec) & set(lg.broadcast_spec)
    assert set(fedper.broadcast_spec) | set(lg.broadcast_spec) == {f"model/{n}" for n in fedper.model}


def test_bodies_stay_and_the_classifier_alone_moves_on_the_server():
    initial, _, _ = whole("lgfedavg", [[]])
    model, memory, strategy = whole("lgfedavg", [[0, 1]])
    assert all(n.split("/")[-1].startswith(("encoder", "projector")) for n in memory)
    assert any((v != memory[n.replace("1000/", "1001/")]).any() for n, v in memory.items() if n.startswith("1000/"))
    assert set(strategy.upload_spec) == {"model/classifier.weight", "model/classifier.bias"}
    assert {n for n, v in model.items() if (v != initial[n]).any()} == {"classifier.weight", "classifier.bias"}
