"""FedProto: its distance and its prediction by hand, and Local without the distance."""

import pytest
import torch
from hand import client_of, heads, losses_of, whole
from helpers import close

from contrafed.core.split_model import Features


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


def test_scores_do_not_depend_on_the_batch_size():
    """Features far from 0 and near their prototypes: a matrix product loses their distance in float32."""
    torch.manual_seed(0)
    means = 100 + torch.randn(10, 64)
    z = means[torch.arange(100) % 10] + 0.01 * torch.randn(100, 64)
    received = {"proto/mean": means, "proto/valid": torch.ones(10)}
    client, logits = client_of("fedproto"), torch.zeros(100, 10)
    together = client.scores(Features(logits, z, ()), received)
    alone = [client.scores(Features(logits[:1], z[i : i + 1], ()), received) for i in range(100)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=0)


def test_without_distance_it_is_local():
    close(heads(whole("fedproto", prototype_weight=0.0)[1]), whole("local")[1])
