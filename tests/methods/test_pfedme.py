"""pFedMe: exact and inner steps by hand, and Local without the pull. test_by_hand.py has the golden values."""

import pytest
import torch
from helpers import FULL_COHORTS, close
from left import build_broadcast, digits_left, scalar_client, scalar_left

from contrafed.clients.pfedme import PFedMeClient

RATE = {"lr": 0.01}


def test_inner_steps_by_hand():
    """Two steps a batch, two batches, f = (theta - 1)^2 / 2, w = 0, lambda = 1, rates 0.1 and 0.5."""
    changes = {"inner_steps": 2, "pull_weight": 1.0, "outer_lr": 0.5, "local": {"iterations": 2}}
    (update,) = scalar_client("pfedme", 1, **changes).update([build_broadcast(model=0.0)], 1)
    w = theta = 0.0
    for _ in range(2):
        for _ in range(2):
            theta -= 0.1 * (theta - 1 + theta - w)
        w -= 0.5 * (w - theta)
    assert float(update.client_state["own/classifier.w"]) == pytest.approx(theta, abs=1e-12)
    assert float(update.tensors["model/classifier.w"]) == pytest.approx(w, abs=1e-12)


def test_without_the_pull_w_stays_and_theta_trains_alone():
    run = digits_left("pfedme", pull_weight=0.0, inner_steps=1)
    for model in run.models[1:]:
        close(model, run.models[0], tolerance=1e-12)  # a mean of equal models
    first = digits_left("pfedme", [[0, 1, 2, 3]], pull_weight=0.0, inner_steps=1)
    once = digits_left("local", [[0, 1, 2, 3]], local={"weight_decay": 0.001})
    for client in first.client_state:
        close(first.own(client), once.own(client, "personal"), tolerance=1e-12)


def test_the_server_goes_a_part_of_the_way():
    whole, half = (scalar_left("pfedme", FULL_COHORTS[:1], server_mix=mix, local=RATE).w[0] for mix in (1.0, 0.5))
    beyond, none = (scalar_left("pfedme", FULL_COHORTS[:1], server_mix=mix, local=RATE).w[0] for mix in (2.0, 0.0))
    assert none == 2.0
    assert (half - 2, beyond - 2) == (pytest.approx((whole - 2) / 2), pytest.approx((whole - 2) * 2))


def test_a_batch_is_the_same_images_for_all_its_steps():
    seen = []

    class Watching(PFedMeClient):
        def loss(self, params, batch, loss_inputs):
            seen.append(batch.x.clone())
            return super().loss(params, batch, loss_inputs)

    local = {"augment": ["crop"], "epochs": None, "iterations": 2}
    digits_left("pfedme", [[0]], client_class=Watching, inner_steps=3, local=local)
    assert len(seen) == 6
    assert all(torch.equal(seen[0], x) for x in seen[1:3])
    assert all(torch.equal(seen[3], x) for x in seen[4:])
    assert not torch.equal(seen[0], seen[3])
