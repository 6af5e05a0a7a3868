"""MpFedcon: its contrast by hand, equality to FedRep without it, and what its messages reveal."""

import math

import numpy as np
import pytest
import torch
from hand import client_of, heads, losses_of, rule_of, whole
from helpers import close, config_of, workspace_of

from contrafed.server.base import Replies, Reply
from contrafed.training.losses import cosine


def test_contrast_by_hand():
    """M2: equal cosines give ln 2. M3: cos(z, z_glob) = 1, cos(z, z_con) = 0 and T = 0.5 give 0.126928, and the bounds."""
    client = client_of("mpfedcon")
    for now, start, centre, expected in (
        ([1.0, 1.0], [[1.0, 0.0]], [[0.0, 1.0]], math.log(2)),
        ([2.0, 0.0], [[0.0, 1.0]], [[3.0, 0.0]], 0.126928),
        ([1.0, 0.0], [[-1.0, 0.0]], [[1.0, 0.0]], 0.018150),
        ([1.0, 0.0], [[1.0, 0.0]], [[-1.0, 0.0]], 4.018150),
    ):
        losses, _ = losses_of(client, now, start=start, means=centre, valid=[1.0])
        assert losses["contrast"].item() == pytest.approx(expected, abs=5e-7)
    masked, _ = losses_of(client, [1.0, 0.0], start=[[1.0, 0.0]], means=[[0.0, 0.0]], valid=[0.0])
    assert masked["contrast"].item() == 0.0


def test_push_has_no_gradient_at_the_start():
    """M4: at z = z_con the push term is at its maximum, so only the pull has a gradient."""
    client = client_of("mpfedcon", temperature=0.5)
    losses, w = losses_of(client, [1.0, 0.5], start=[[1.0, 0.5]], means=[[0.0, 1.0]], valid=[1.0])
    (gradient,) = torch.autograd.grad(losses["contrast"], w)
    pull = cosine(w, torch.tensor([0.0, 1.0], dtype=torch.float64))
    (towards,) = torch.autograd.grad(pull, w)
    share = torch.sigmoid((1 - pull.detach()) / 0.5) / 0.5
    torch.testing.assert_close(gradient, -share * towards, rtol=1e-9, atol=1e-12)


def test_without_contrast_it_is_fedrep():
    """M1."""
    con, con_memory, _ = whole("mpfedcon", contrast_weight=0.0, head_epochs=2)
    rep, rep_memory, _ = whole("fedrep", head="projector_classifier", head_epochs=2)
    close(con, rep)
    close(heads(con_memory), heads(rep_memory))
    other, _, _ = whole("mpfedcon", contrast_weight=1.0, head_epochs=2)
    with pytest.raises(AssertionError):
        close(con, other)


def test_the_body_phase_may_move_the_whole_model():
    """With Equation 6 over w, heads train even without head epochs. In Algorithm 1's interpretation they do not."""
    initial = whole("mpfedcon", [[]])[0]
    for phase, learns in (("body", False), ("all", True)):
        _, memory, _ = whole("mpfedcon", head_epochs=0, body_phase=phase)
        moved = [not torch.equal(v, initial[n.split("personal/")[1]]) for n, v in heads(memory).items()]
        assert all(moved) if learns else not any(moved)
        assert moved


@pytest.mark.slow
def test_of_the_frozen_model_the_head_may_be_the_new_one():
    """It makes no difference without a head phase, and a difference with one."""
    for epochs, equal in ((0, True), (1, False)):
        first, second = (whole("mpfedcon", head_epochs=epochs, frozen_model=frozen)[0] for frozen in ("all", "body"))
        if equal:
            close(first, second)
        else:
            with pytest.raises(AssertionError):
                close(first, second)


def test_the_bank_pools_every_clients_latest_centres():
    """Clients 0 (3 examples) and 1 (1 example) hold class 0. In the next round only client 1 uploads, also of class 1."""
    rounds = [[(0, [3.0, 0.0], [[1.0], [0.0]]), (1, [1.0, 0.0], [[5.0], [0.0]])], [(1, [1.0, 1.0], [[9.0], [7.0]])]]
    for memory, expected in (("round", [[9.0], [7.0]]), ("bank", [[3.0], [7.0]])):
        rule = rule_of("mpfedcon", (3, 2), {"proto/mean": (2, 1), "proto/valid": (2,)}, centre_memory=memory)
        for replies in rounds:
            rows = [
                Reply(k, {"model/w": torch.zeros(1), "proto/mean": torch.tensor(m), "proto/count": torch.tensor(c)}, 3, {})
                for k, c, m in replies
            ]
            rule.aggregate({"w": torch.zeros(1)}, Replies(rows))
        assert rule.broadcast({"w": torch.zeros(1)})["proto/mean"].tolist() == expected


def test_a_class_without_a_centre_may_have_one_of_zero():
    """cos(z, z_con) = 1 and cos(z, 0) = 0 at T = 0.5 give log(1 + e^2) = 2.126928. With a mask it is 0."""
    for reading, expected in (("zero_vector", 2.126928), ("mask", 0.0)):
        client = client_of("mpfedcon", invalid_centre=reading, temperature=0.5)
        losses, _ = losses_of(client, [1.0, 0.0], start=[[1.0, 0.0]], means=[[0.0, 0.0]], valid=[0.0])
        assert losses["contrast"].item() == pytest.approx(expected, abs=5e-7)


def test_a_loss_is_averaged_over_the_examples_that_had_it():
    """Only the body phase has the contrast, so the head epochs must not reduce its mean."""
    config = config_of("strategy=mpfedcon", "num_clients=4", "model=mlp", "model.hidden=[12]", "model.projection=[9]")
    config["strategy"] |= {"invalid_centre": "zero_vector", "head_epochs": 3}
    workspace = workspace_of(config, dtype=torch.float64)
    seen = []

    class Watched(workspace.client_class):
        def loss(self, params, batch, loss_inputs):
            losses = super().loss(params, batch, loss_inputs)
            seen.append(losses["contrast"].item())
            return losses

    client = Watched(workspace, [0])
    down = dict(zip(client.names("down"), client.get_parameters({}), strict=True))
    config_size = len(workspace.federation.partition.train(0))
    (update,) = client.update([{n: torch.from_numpy(v) for n, v in down.items()}], 1)
    sizes = [min(10, config_size - i) for i in range(0, config_size, 10)]
    assert len(seen) == len(sizes)
    assert update.metrics["contrast"] == pytest.approx(np.average(seen, weights=sizes), rel=1e-9)


def test_the_label_rule_of_gradient_leakage_finds_no_input():
    """M8 (iDLG): one step on one example reveals its label in the classifier's update, which MpFedcon never uploads."""
    for name in ("fedavg", "mpfedcon"):
        config = config_of(f"strategy={name}", "num_clients=4", "model=mlp")
        config["strategy"]["local"] |= {"epochs": None, "iterations": 1, "batch_size": 1, "momentum": 0.0}
        workspace = workspace_of(config, dtype=torch.float64)
        workspace.federation.partition.train = lambda client: np.array([17])
        client = workspace.client_class(workspace, [0])
        received = client.get_parameters({})
        upload = dict(zip(client.names("up"), client.fit(received, {})[0], strict=True))
        bias = upload.get("model/classifier.bias")
        if name == "fedavg":
            gradient = workspace.initial["classifier.bias"].numpy() - bias
            assert np.flatnonzero(gradient < 0).tolist() == [int(workspace.y[17])]
        else:
            assert bias is None
            assert not any(n.startswith(("model/classifier", "model/projector")) for n in upload)
