"""FedAGM: by hand, the golden run, and FedAvg with neither momentum nor pull."""

import torch
from hand import path, rule_of


def test_by_hand():
    """D = 1 and rho = 0.5 give W = 1, 2.5, 4.25. The broadcasts are 0, 1.5, 3.25, but W is evaluated."""
    strategy = rule_of("fedagm", server_momentum=0.5)
    models, sent = path(strategy, [1, 1, 1])
    assert models == [1, 2.5, 4.25]
    assert sent[:2] == [1.5, 3.25]
    assert strategy.broadcast_for_evaluation({"w": torch.tensor([4.25])})["model/w"].item() == 4.25


def test_the_model_moves_by_the_momentum():
    """W_(t+1) = W_t + m_(t+1) exactly, with m from the broadcast W + rho m."""
    models, sent = path(rule_of("fedagm", server_momentum=0.5), [1, -2, None, 4])
    for before, after, ahead in zip([0.0, *models], models, sent, strict=False):
        if after != before:
            assert after == before + (ahead - after) / 0.5
    assert (models[2], sent[2]) == (models[1], sent[1])
