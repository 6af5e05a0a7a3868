"""FedProto: its distance and its prediction by hand, and Local without the distance."""

import pytest
import torch
from hand import client_of, heads, losses_of, rule_of, whole
from helpers import close

from contrafed.core.split_model import Features
from contrafed.server.base import Replies, Reply


def test_distance_by_hand():
    """z = (1,3), P = (0,1): (1 + 4) / 2 = 2.5."""
    losses, _ = losses_of(client_of("fedproto"), [1.0, 3.0], means=[[0.0, 1.0]], valid=[1.0])
    assert losses["distance"].item() == pytest.approx(2.5)
    losses, _ = losses_of(client_of("fedproto"), [1.0, 3.0], means=[[0.0, 1.0]], valid=[0.0])
    assert losses["distance"].item() == 0.0


def test_it_predicts_the_nearest_valid_prototype():
    client = client_of("fedproto")
    features = Features(torch.tensor([[0.0, 9.0, 0.0]]), torch.tensor([[1.0, 1.0]]), ())
    means = torch.tensor([[5.0, 5.0], [1.0, 1.0], [2.0, 1.0]])

    def predict_class(valid):
        return client.scores(features, {"proto/mean": means, "proto/valid": torch.tensor(valid)}).argmax(1).item()

    assert predict_class([1.0, 1.0, 1.0]) == 1
    assert predict_class([1.0, 0.0, 1.0]) == 2
    assert predict_class([0.0, 0.0, 0.0]) == 1  # no prototype yet: the head


def test_it_may_predict_by_its_head():
    features = Features(torch.tensor([[0.0, 9.0, 0.0]]), torch.tensor([[1.0, 1.0]]), ())
    received = {"proto/mean": torch.tensor([[1.0, 1.0], [5.0, 5.0], [2.0, 1.0]]), "proto/valid": torch.ones(3)}
    for predict, expected in (("prototype", 0), ("head", 1)):
        assert client_of("fedproto", predict=predict).scores(features, received).argmax(1).item() == expected
    assert torch.equal(client_of("fedproto", predict="head").scores(features, received), features.logits)


@pytest.mark.parametrize(
    ("weights", "expected"), [({}, 3.0), ({"prototype_weights": "plain"}, 3.0), ({"prototype_weights": "class_count"}, 2.0)]
)
def test_holders_of_a_class_weigh_as_prototype_weights_says(weights, expected):
    """Prototypes 1 and 5 of 3 and 1 examples: (1 + 5) / 2, or (3 + 5) / 4."""
    rule = rule_of("fedproto", (4, 6), {"proto/mean": (1, 1), "proto/valid": (1,)}, **weights)
    replies = [
        Reply(k, {"proto/mean": torch.tensor([[mean]]), "proto/count": torch.tensor([count])}, size, {})
        for k, (mean, count, size) in enumerate([(1.0, 3.0, 4), (5.0, 1.0, 6)])
    ]
    rule.aggregate({}, Replies(replies))
    assert rule.broadcast({})["proto/mean"].item() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["fedproc", "fedpac"])
def test_holders_of_a_class_weigh_by_its_examples_in_other_methods(name):
    """FedProc's pooled mean, FedPAC's by class count: 1 and 5 of 3 and 1 examples are (3 + 5) / 4."""
    rule = rule_of(name, (4, 6), {"proto/mean": (1, 1), "proto/valid": (1,), "head/classifier.w": (1,)})
    own = {
        "model/w": torch.zeros(1), "head/classifier.w": torch.zeros(1), "stat/h": torch.zeros(1, 1), "stat/v": torch.ones(()),
    }  # fmt: skip
    replies = [
        Reply(k, own | {"proto/mean": torch.tensor([[mean]]), "proto/count": torch.tensor([count])}, size, {})
        for k, (mean, count, size) in enumerate([(1.0, 3.0, 4), (5.0, 1.0, 6)])
    ]
    rule.aggregate({"w": torch.zeros(1)}, Replies(replies))
    assert rule.broadcast({"w": torch.zeros(1)})["proto/mean"].item() == pytest.approx(2.0)


def test_without_distance_it_is_local():
    close(heads(whole("fedproto", prototype_weight=0.0)[1]), whole("local")[1])
