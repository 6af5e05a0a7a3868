"""FedAvg+FitNet: its hint by hand, a zero hint in the first step, and equality to FedAvg without it."""

import pytest
import torch
from hand import class_losses
from helpers import digits_run

from contrafed.clients.fedavg_fitnet import FitNetClient
from contrafed.core.split_model import Features


def test_by_hand(monkeypatch):
    """h (1, 2, 2) with the hint (1, 0, 0) gives 8/3, not 4."""
    # With a second level (0, 3) and (0, 1) it is (8/3 + 2) / 2, and the second level alone gives 2.
    h, second = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64), torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    own = torch.tensor([[0.0, 3.0]], dtype=torch.float64)
    two = ((h, second), (own,))
    cases = ((5, (h,), (), 8 / 3), (5, *two, (8 / 3 + 2) / 2), (1, *two, 8 / 3), ("last", *two, 2))
    for told, hints, levels, expected in cases:
        forward = FitNetClient.forward

        def with_its_levels(self, params, batch, with_levels=False, forward=forward, levels=levels):
            found = forward(self, params, batch)
            return found._replace(levels=(found.z, *levels))

        with monkeypatch.context() as patch:
            patch.setattr(FitNetClient, "forward", with_its_levels)
            changes = {"hint_weight": 0.5, "levels": told}
            losses, _ = class_losses("fedavg_fitnet", [1.0, 2.0, 2.0], 0, changes, hints=Features(h, h, hints))
        assert losses["hint"].item() == pytest.approx(expected, rel=1e-12)
        assert losses["loss"].item() == pytest.approx(losses["task"].item() + expected / 2, rel=1e-12)


def test_at_the_first_step_hint_and_gradient_are_0():
    seen = []

    class Watched(FitNetClient):
        def loss(self, params, batch, loss_inputs):
            losses = super().loss(params, batch, loss_inputs)
            seen.append(losses["hint"].item())
            return losses

    work = {"epochs": None, "iterations": 1, "batch_size": 16, "lr": 0.1}
    digits_run("fedavg_fitnet", 1, clients=2, model="cnn_pmfl", client_class=Watched, local=work, hint_weight=1e6)
    assert len(seen) == 2
    assert max(seen) < 1e-24
    fitnet, fedavg = (digits_run(n, 1, clients=2, local=work, weights="uniform")[0] for n in ("fedavg_fitnet", "fedavg"))
    for name, value in fedavg[-1].items():
        torch.testing.assert_close(fitnet[-1][name], value, rtol=0, atol=1e-14)
