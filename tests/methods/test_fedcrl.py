"""FedCRL and FedCoSR: loss, blend and aggregation by hand, the reductions, and the client state."""

import math

import pytest
import torch
from hand import client_of, heads, losses_of, rule_of, whole
from helpers import build_received, close, config_of, read_rows, same, workspace_of

from contrafed.runs.run import run
from contrafed.server.base import Replies, Reply
from contrafed.training.losses import prototype_contrast

TWO_CLASSES = torch.eye(2, dtype=torch.float64)


def infonce(z, y, means=TWO_CLASSES, valid=(1, 1), temperature=0.1):
    """Return the contrastive loss of a representation (2,), and its gradient."""
    losses, z = losses_of(client_of("fedcrl", temperature=temperature), z, y, means=means, valid=valid)
    losses["contrast"].backward()
    return losses["contrast"].item(), z.grad


def test_infonce_by_hand():
    """I4: two classes, W = (1,0), (0,1), T = 0.1, w = (5,0)."""
    assert infonce([5.0, 0.0], 0)[0] == pytest.approx(4.5399e-5, rel=1e-4)
    assert infonce([5.0, 0.0], 1)[0] == pytest.approx(10.0000454, abs=1e-6)
    assert infonce([0.3, 0.4], 1)[0] == pytest.approx(infonce([30.0, 40.0], 1)[0], rel=1e-12)


def test_infonce_of_equal_prototypes_is_log_of_their_number_with_no_gradient():
    """I5."""
    value, gradient = infonce([0.7, -0.2], 1, means=torch.ones(2, 2, dtype=torch.float64))
    assert value == pytest.approx(math.log(2), rel=1e-12)
    assert gradient.abs().max() < 1e-12


def test_infonce_is_bounded():
    """I5: log(1 + (C - 1) e^(2/T)) for C = 10 and T = 0.1, with the class's prototype opposite and all others equal."""
    means = torch.tensor([[-1.0, 0.0]] + [[1.0, 0.0]] * 9)
    assert infonce([3.0, 0.0], 0, means=means, valid=[1] * 10)[0] == pytest.approx(22.19722, abs=1e-5)


def test_infonce_masks_classes_without_a_prototype():
    assert infonce([5.0, 0.0], 1, valid=(1, 0))[0] == 0.0
    assert infonce([5.0, 0.0], 0, valid=(1, 0))[0] == 0.0  # no negatives


def blend_at_start(own, received, loss, rounds=1.0, contrasted=1.0, table=None, **changes):
    """Return the blended start of a client's round, uploaded without training, for this body and contrastive loss in its state.

    ``table``: the prototypes of the two classes that the client receives. Its single image is of class 0.
    """
    client = client_of("fedcrl", separate=False, local={"epochs": None, "iterations": 0}, **changes)
    tensor = lambda v: torch.tensor(v, dtype=torch.float64)  # noqa: E731
    memory = {"contrast": tensor(loss), "has_contrast": tensor(contrasted), "participations": tensor(rounds)}
    client.client_states = [{"own/classifier.w": tensor([own, own]), **memory}]
    means, valid = (torch.zeros(2, 2), torch.zeros(2)) if table is None else (tensor(table), torch.ones(2))
    prototypes = {"proto/mean": means, "proto/valid": valid}
    (update,) = client.update([{"model/classifier.w": tensor([received, received]), **prototypes}], 2)
    assert torch.equal(update.client_state["own/classifier.w"], update.tensors["model/classifier.w"])
    return update.tensors["model/classifier.w"][0].item()


def tau_of(loss, **changes):
    """Return the weight of the own body."""
    return blend_at_start(1.0, 0.0, loss, **changes)


def test_blend_weight_by_hand():
    """I2 and I3: tau = e^(-gamma L)."""
    assert tau_of(math.log(10)) == pytest.approx(0.158489, abs=1e-6)
    assert tau_of(1.0) == pytest.approx(0.449329, abs=1e-6)
    assert tau_of(0.0) == 1.0
    assert tau_of(5.0, blend_rate=0.0) == 1.0
    assert tau_of(0.1, blend_rate=1e6) == 0.0
    assert (tau_of(1.0, blend="global"), tau_of(1.0, blend="own")) == (0.0, 1.0)


NEAR_CASES = [
    [1.0, 1.0],
    [1.0, -1.0],
]  # with a representation (1, 1) of class 0: cosines 1 and 0, log(1 + e^-1) = 0.313262 at T = 1
NEAR_WEIGHT = math.exp(-0.8 * 0.313262)


def test_the_first_tau_is_what_first_tau_says():
    """For a client without a contrastive loss, whose state has a loss of 0. Later tau follows the loss."""
    for first_tau, expected in (("evaluate", NEAR_WEIGHT), ("zero", 0.0), ("one", 1.0)):
        asked = {"first_tau": first_tau, "table": NEAR_CASES, "temperature": 1.0}
        assert tau_of(0.0, contrasted=0.0, **asked) == pytest.approx(expected, abs=1e-6)
        assert tau_of(2.0, **asked) == pytest.approx(math.exp(-1.6), rel=1e-9)
    assert tau_of(0.0, contrasted=0.0) == 0.0  # evaluated, and there is no prototype: the global body


def test_tau_may_be_set_by_the_prototypes_just_received():
    for tau_source, expected in (("train_mean", math.exp(-1.6)), ("on_receipt", NEAR_WEIGHT)):
        assert tau_of(2.0, tau_source=tau_source, table=NEAR_CASES, temperature=1.0) == pytest.approx(expected, abs=1e-6)
        even = tau_of(2.0, tau_source=tau_source, table=[[1.0, 0.0], [0.0, 1.0]])  # equal cosines: ln 2 for any T
        assert even == pytest.approx(2**-0.8 if tau_source == "on_receipt" else math.exp(-1.6), abs=1e-6)


def test_without_contrast_tau_may_be_zero():
    for weight, reading, expected in ((0.0, "evaluate", 0.449329), (0.0, "zero", 0.0), (1.0, "zero", 0.449329)):
        assert tau_of(1.0, contrast_weight=weight, blend_without_contrast=reading) == pytest.approx(expected, abs=1e-6)


def test_a_literal_clip_puts_every_weight_between_0_and_1():
    """The blend before the clip is 0.449329 * own + 0.550671 * received."""
    for own, received, expected in ((5.0, 2.0, 1.0), (-5.0, -2.0, 0.0), (0.5, 0.25, 0.362332)):
        assert blend_at_start(own, received, 1.0, clip="literal") == pytest.approx(expected, abs=1e-6)
    assert blend_at_start(5.0, 2.0, 1.0, clip="none") == pytest.approx(3.347987, abs=1e-6)


def test_a_literal_clip_leaves_statistics_alone():
    settings = ("model=cnn_bn", "model.channels=[3]", "model.kernel=3", "strategy=fedcrl", "num_clients=4", "partition=iid")
    workspace = workspace_of(config_of(*settings, "strategy.clip=literal", "strategy.local.last_batch=merge"))
    (update,) = workspace.client_class(workspace, [0]).update([build_received(workspace)], 1)
    assert update.tensors["model/encoder.stages.0.1.num_batches_tracked"] > 1
    assert update.tensors["model/encoder.stages.0.1.weight"].max() <= 1


def test_the_own_body_is_weighted_by_tau():
    """I8: tau = 0.25, own 2, global 10 gives 8. Vectors give 0.449329 * 5 + 0.550671 * 2."""
    assert blend_at_start(2.0, 10.0, -math.log(0.25) / 0.8) == pytest.approx(8.0)
    assert blend_at_start(5.0, 2.0, 1.0) == pytest.approx(3.347987, abs=1e-6)
    assert blend_at_start(1.0, 2.0, 0.0) == 1.0
    assert blend_at_start(1.0, 2.0, 0.0, rounds=0.0) == 2.0  # a first participation takes the global body whole


def train_epoch(valid, **changes):
    """Return client 0's state after an epoch with random prototypes of the classes ``valid``, its client and its message."""
    config = config_of("strategy=fedcrl", "num_clients=4", "model=mlp", "model.hidden=[12]")
    config["strategy"] |= {"local": config["strategy"]["local"] | {"epochs": 1, "lr": 1e-12, **changes}}
    workspace = workspace_of(config, dtype=torch.float64)
    client = workspace.client_class(workspace, [0])
    received = {f"model/{n}": v for n, v in workspace.initial.items() if not n.startswith("classifier")}
    exists = torch.zeros(10, dtype=torch.float64)
    exists[valid] = 1
    received |= {
        "proto/mean": torch.rand(10, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        "proto/valid": exists,
    }
    (update,) = client.update([received], 1)
    return update, client, received


def test_tau_is_set_by_the_examples_whose_class_has_a_prototype():
    """Counting the others would make the loss too small and keep a client at its own body. Training counts them as 0."""
    held = [0, 1]
    update, client, received = train_epoch(held)
    workspace = client.workspace
    index = torch.from_numpy(workspace.federation.partition.train(0))
    y = workspace.y[index]
    known = torch.isin(y, torch.tensor(held))
    assert 0 < known.sum() < len(y)
    z = workspace.model(workspace.images(index)).z.detach()
    each = prototype_contrast(z, y, received["proto/mean"], received["proto/valid"], 0.1)
    assert update.client_state["contrast"].item() == pytest.approx(each[known].mean().item(), rel=1e-6)  # a rate of 1e-12
    assert update.metrics["contrast"] == pytest.approx(each.mean().item(), rel=1e-6)
    assert update.metrics["contrasted"] == pytest.approx(known.double().mean().item())
    assert update.client_state["has_contrast"] == 1


def test_a_client_none_of_whose_classes_has_a_prototype_was_not_contrasted():
    """It evaluates its loss when it returns, and takes the global body if it still cannot."""
    update, client, received = train_epoch([])
    assert (update.client_state["has_contrast"], update.client_state["contrast"]) == (0, 0)
    client.client_states, began = [update.client_state], []
    client.train = lambda stack, **kept: began.append({n: v.clone() for n, v in stack.params.items()}) or stop()

    def stop():
        raise KeyboardInterrupt

    for valid in (False, True):
        other = {n: v + 1.0 if n.startswith("model/") else v for n, v in received.items()}
        with pytest.raises(KeyboardInterrupt):
            client.update([other | {"proto/valid": torch.full((10,), float(valid), dtype=torch.float64)}], 2)
    own, name = update.client_state["own/encoder.stages.0.1.weight"], "encoder.stages.0.1.weight"
    tau = [1 - ((start[name][0] - own) / (other[f"model/{name}"] - own)).mean().item() for start in began]
    assert tau[0] == pytest.approx(0, abs=1e-6)
    assert 1e-6 < tau[1] < 0.99


def test_golden_aggregation():
    """n = (3, 1), phi = (1, 5), classes held (2, 1) and (1, 0): phi = 2, Omega_0 = (2, 0), Omega_1 = (0, 2)."""
    server = rule_of("fedcrl", (3, 1), {"proto/mean": (2, 2), "proto/valid": (2,)})
    replies = [
        Reply(k, {"model/w": torch.tensor([w]), "proto/mean": torch.tensor(means), "proto/count": torch.tensor(counts)}, n, {})
        for k, (n, w, counts, means) in enumerate(
            [(3, 1.0, [2.0, 1.0], [[1.0, 0.0], [0.0, 2.0]]), (1, 5.0, [1.0, 0.0], [[4.0, 0.0], [0.0, 0.0]])]
        )
    ]
    model = server.aggregate({"w": torch.tensor([0.0])}, Replies(replies))
    assert float(model["w"]) == 2.0
    sent = server.broadcast(model)
    assert sent["proto/mean"].tolist() == [[2.0, 0.0], [0.0, 2.0]]
    assert sent["proto/valid"].tolist() == [1.0, 1.0]


def test_fedcosr_is_fedcrl_bit_for_bit():
    for a, b in zip(whole("fedcrl")[:2], whole("fedcosr")[:2], strict=True):
        assert same(a, b)


def test_without_contrast_and_blend_it_is_fedper():
    """I1: alpha = 0 and tau = 0."""
    crl, crl_memory, _ = whole("fedcrl", contrast_weight=0.0, blend="global")
    per, per_memory, _ = whole("fedper")
    close(crl, per)
    close(heads(crl_memory), heads(per_memory))


def test_keeping_its_own_body_it_is_local_training():
    """I1: alpha = 0 and tau = 1, with all clients from the initial round on."""
    everyone = [range(8)] * 3
    _, crl, _ = whole("fedcrl", everyone, contrast_weight=0.0, blend="own")
    _, local, _ = whole("local", everyone)
    own = {n.replace("/own/", "/personal/"): v for n, v in crl.items() if "/own/" in n or "/personal/" in n}
    close(own, local)


def test_without_separation_contrast_and_blend_it_is_fedavg():
    crl, _, _ = whole("fedcrl", contrast_weight=0.0, blend="global", separate=False)
    fedavg, _, _ = whole("fedavg")
    close(crl, fedavg)


def test_bytes_match_the_papers_formula():
    """I9: 2 [phi] + 2 [Omega] scalars, plus the counts and validity that the formula leaves out."""
    _, _, strategy = whole("fedcrl", [range(8)])
    body = sum(v.numel() for n, v in strategy.model.items() if "classifier" not in n)
    table = 10 * 9
    assert strategy.round.bytes_down == 8 * 4 * (body + table + 10)
    assert strategy.round.bytes_up == 8 * 8 * (body + table + 10)  # this run is in float64


def test_a_client_that_sat_out_ten_rounds_comes_back_as_it_left():
    steps = {"epochs": None, "iterations": 3}
    _, left, _ = whole("fedcrl", [[0, 1]], local=steps)
    _, kept, _ = whole("fedcrl", [[0, 1]] + [[1, 2]] * 10, local=steps)
    mine = {n: v for n, v in left.items() if n.startswith("1000/")}
    assert mine
    assert all(torch.equal(v, kept[n]) for n, v in mine.items())


@pytest.mark.parametrize("separate", [True, False])
def test_clients_are_evaluated_by_their_own_bodies_though_everything_may_travel(tmp_path, separate):
    """With a shared classifier, scores are still personal, and the server also has a global model."""
    config = config_of(
        "strategy=fedcrl", "engine=local", "num_clients=4", "num_rounds=2", "eval_every=1", "participation=full", "model=mlp",
        "model.hidden=[8]", "partition.test_fraction=0.2",
    )  # fmt: skip
    config["strategy"]["separate"] = separate
    summary = run(config | {"save_personal": True, "output_dir": f"{tmp_path}/run"})
    assert (summary["accuracy_final"] is None) == separate
    assert 0 < summary["personal_accuracy_mean"] <= summary["personal_accuracy_best"] <= 1
    kinds = {(row["scope"], row["split"], row["metric"]) for row in read_rows(tmp_path / "run" / "metrics.csv")}
    assert ("personal", "test", "accuracy_worst_decile") in kinds
    assert (("global", "test", "accuracy") in kinds) != separate
    assert not any(scope == "global" and split == "clients" for scope, split, _ in kinds)
    assert ",accuracy," in (tmp_path / "run" / "clients.csv").read_text()
    assert len(list((tmp_path / "run" / "personal").iterdir())) == 4
