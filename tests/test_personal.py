"""Methods with personal models: hand-computed losses and tables, reductions, messages, memory, and stacked == one by one."""

import csv
import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rig import (
    PERSONAL,
    Schedule,
    Vector,
    close,
    config_of,
    run_strategy,
    same,
    scalar_workspace,
    strategy_settings,
    workspace_of,
)

from clients.base import PARTS, Batch, Stack
from clients.training.workspace import client_class_of
from contrafed.experiment import run
from core.errors import UserError
from core.run import choose, node_run
from simulation.grid import LocalGrid
from strategies.base import Replies, Reply
from strategies.prototypes import Prototypes

TWO = torch.eye(2, dtype=torch.float64)


def client_of(name, **changes):
    """A client whose representation of every image is its two parameters."""
    settings = config_of("num_nodes=1") | {"strategy": strategy_settings(name, **changes)}
    workspace = scalar_workspace(settings, Vector([1.0, 0.0]), targets=(1,))
    return workspace.client_class(workspace, [0])


# --------------------------------------------------------------------------------------------------------------- FedCRL


def infonce(z, y, means=TWO, valid=(1, 1), temperature=0.1):
    client = client_of("fedcrl", temperature=temperature)
    z = torch.tensor([z], dtype=torch.float64, requires_grad=True)
    table = {"means": means, "valid": torch.tensor(valid, dtype=torch.float64)}
    value = client._each(z, torch.tensor([y]), table)
    value.sum().backward()
    return value.item(), z.grad


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


def test_infonce_masks_classes_without_a_prototype():
    assert infonce([5.0, 0.0], 1, valid=(1, 0))[0] == 0.0
    assert infonce([5.0, 0.0], 0, valid=(1, 0))[0] == 0.0  # no negatives


def tau_of(loss, **changes):
    client = client_of("fedcrl", **changes)
    one = torch.ones(1, dtype=torch.float64)
    memory = {"contrast": torch.tensor([loss], dtype=torch.float64), "contrasted": one, "rounds": one}
    return client._tau(Stack([0], 2, {}, {}, memory, one)).item()


def test_blend_weight_by_hand():
    """I2 and I3: tau = e^(-gamma L)."""
    assert tau_of(math.log(10)) == pytest.approx(0.158489, abs=1e-6)
    assert tau_of(1.0) == pytest.approx(0.449329, abs=1e-6)
    assert tau_of(0.0) == 1.0
    assert tau_of(5.0, blend_rate=0.0) == 1.0
    assert tau_of(0.1, blend_rate=1e6) == 0.0
    assert (tau_of(1.0, blend="global"), tau_of(1.0, blend="own")) == (0.0, 1.0)


def blended(own, received, loss, rounds=1.0):
    """What a node's body is after the blend."""
    client = client_of("fedcrl")
    client.parts = ("encoder", "projector", "classifier")  # the one parameter counts as body
    tensor = lambda v: torch.tensor([v], dtype=torch.float64)  # noqa: E731
    memory = {
        "own/classifier.w": tensor([own, own]),
        "contrast": tensor(loss),
        "contrasted": tensor(1.0),
        "rounds": tensor(rounds),
    }
    stack = Stack(
        [0], 2, {"classifier.w": tensor([0.0, 0.0])}, {"model/classifier.w": tensor([received, received])}, memory, tensor(1.0)
    )
    client.start(stack)
    return stack.params["classifier.w"][0, 0].item()


def test_the_own_body_is_weighted_by_tau():
    """I8: tau = 0.25, own 2, global 10 gives 8; and the vector case of section 46: 0.449329 * 5 + 0.550671 * 2."""
    assert blended(2.0, 10.0, -math.log(0.25) / 0.8) == pytest.approx(8.0)
    assert blended(5.0, 2.0, 1.0) == pytest.approx(3.347987, abs=1e-6)
    assert blended(1.0, 2.0, 0.0) == 1.0
    assert blended(1.0, 2.0, 0.0, rounds=0.0) == 2.0  # a first participation takes the global body whole


# -------------------------------------------------------------------------------------------------------- prototype tables


def merged(rows, weighting="class_count", means=None, valid=None):
    """The table after replies (num_examples, counts (C,), means (C, D))."""
    shape, state = np.shape(rows[0][2]), {}
    table = Prototypes(state, {"proto/mean": shape, "proto/valid": shape[:1]})
    if means is not None:
        state |= {"means": torch.tensor(means), "valid": torch.tensor(valid)}
    table.merge(
        Replies(
            Reply(k, {"proto/count": torch.tensor(c), "proto/mean": torch.tensor(m)}, n, {}) for k, (n, c, m) in enumerate(rows)
        ),
        weighting,
    )
    return state["means"].tolist(), state["valid"].tolist()


def test_prototypes_are_pooled_by_class_count():
    """I6: 3 examples of mean (1,0) and 1 of mean (0,4) give (0.75, 1); a node without the class changes nothing."""
    rows = [(3, [3.0], [[1.0, 0.0]]), (1, [1.0], [[0.0, 4.0]]), (9, [0.0], [[0.0, 0.0]])]
    assert merged(rows) == ([[0.75, 1.0]], [1.0])


def test_prototype_weightings_by_hand():
    """M7: two holders with counts (3,1) and centres 1 and 5: by class count 2, plain 3, by data (n = 10, 30) 4."""
    rows = [(10, [3.0], [[1.0]]), (30, [1.0], [[5.0]])]
    assert merged(rows)[0] == [[2.0]]
    assert merged(rows, "plain")[0] == [[3.0]]
    assert merged(rows, "data")[0] == [[4.0]]


def test_a_class_that_nobody_held_keeps_its_prototype():
    """Section 46: c_0 = (9,9) stays, c_1 from counts (1,3) and centres (1,1), (5,1) becomes (4,1)."""
    rows = [(1, [0.0, 1.0], [[0.0, 0.0], [1.0, 1.0]]), (3, [0.0, 3.0], [[0.0, 0.0], [5.0, 1.0]])]
    assert merged(rows, means=[[9.0, 9.0], [0.0, 0.0]], valid=[1.0, 0.0]) == ([[9.0, 9.0], [4.0, 1.0]], [1.0, 1.0])


def test_prototypes_are_class_means_over_the_whole_training_part():
    config = config_of("strategy=fedproto", "num_nodes=5", "model=mlp", "model.hidden=[6]")
    workspace = workspace_of(config, dtype=torch.float64)
    for nodes in ([2], [0, 1, 3]):
        client = workspace.client_class(workspace, nodes)
        stack = Stack(
            nodes, 1, {n: v.expand(len(nodes), *v.shape) for n, v in workspace.initial.items()}, {}, {}, torch.ones(len(nodes))
        )
        means, counts = client.prototypes(stack)
        for row, node in enumerate(nodes):
            index = torch.from_numpy(workspace.federation.partition.train(node))
            z, y = workspace.model(workspace.images(index)).z, workspace.y[index]
            assert counts[row].tolist() == torch.bincount(y, minlength=10).tolist()
            for c in y.unique():
                torch.testing.assert_close(means[row, c], z[y == c].mean(0), rtol=1e-9, atol=1e-9)
            assert means[row][counts[row] == 0].abs().max() == 0


# ---------------------------------------------------------------------------------------------------- MpFedcon and FedProto


def losses_of(client, now, phase="batches", y=0, **constants):
    w = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    batch = Batch(torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.tensor([y]), one, one)
    tensors = {n: torch.tensor(v, dtype=torch.float64) for n, v in constants.items()}
    return client.loss({"classifier.w": w}, batch, tensors), w


def test_mpfedcon_contrast_by_hand():
    """M2: equal cosines give ln 2; M3: cos(z, z_glob) = 1, cos(z, z_con) = 0, T = 0.5 give 0.126928, and the bounds."""
    client = client_of("mpfedcon")
    for now, start, centre, expected in (
        ([1.0, 1.0], [[1.0, 0.0]], [[0.0, 1.0]], math.log(2)),
        ([2.0, 0.0], [[0.0, 1.0]], [[3.0, 0.0]], 0.126928),
        ([1.0, 0.0], [[-1.0, 0.0]], [[1.0, 0.0]], 0.018150),
        ([1.0, 0.0], [[1.0, 0.0]], [[-1.0, 0.0]], 4.018150),
    ):
        losses, _ = losses_of(client, now, start=start, centre=centre, known=[1.0])
        assert losses["contrast"].item() == pytest.approx(expected, abs=5e-7)
    masked, _ = losses_of(client, [1.0, 0.0], start=[[1.0, 0.0]], centre=[[0.0, 0.0]], known=[0.0])
    assert masked["contrast"].item() == 0.0


def test_mpfedcon_push_has_no_gradient_at_the_start():
    """M4: where z = z_con the push term is at its maximum, so that only the pull acts."""
    client = client_of("mpfedcon", temperature=0.5)
    losses, w = losses_of(client, [1.0, 0.5], start=[[1.0, 0.5]], centre=[[0.0, 1.0]], known=[1.0])
    (gradient,) = torch.autograd.grad(losses["contrast"], w)
    from clients.losses import cosine

    pull = cosine(w, torch.tensor([0.0, 1.0], dtype=torch.float64))
    (towards,) = torch.autograd.grad(pull, w)
    share = torch.sigmoid((1 - pull.detach()) / 0.5) / 0.5
    torch.testing.assert_close(gradient, -share * towards, rtol=1e-9, atol=1e-12)


def test_fedproto_distance_by_hand():
    """z = (1,3), P = (0,1): (1 + 4) / 2 = 2.5."""
    losses, _ = losses_of(client_of("fedproto"), [1.0, 3.0], prototype=[[0.0, 1.0]], known=[1.0])
    assert losses["distance"].item() == pytest.approx(2.5)
    losses, _ = losses_of(client_of("fedproto"), [1.0, 3.0], prototype=[[0.0, 1.0]], known=[0.0])
    assert losses["distance"].item() == 0.0


def test_fedproto_predicts_the_nearest_valid_prototype():
    from models.base import Features

    client = client_of("fedproto")
    features = Features(torch.tensor([[0.0, 9.0, 0.0]]), torch.tensor([[1.0, 1.0]]), ())
    means = torch.tensor([[5.0, 5.0], [1.0, 1.0], [2.0, 1.0]])
    judged = lambda valid: client.judge(features, {"proto/mean": means, "proto/valid": torch.tensor(valid)}).argmax(1).item()  # noqa: E731
    assert judged([1.0, 1.0, 1.0]) == 1
    assert judged([1.0, 0.0, 1.0]) == 2
    assert judged([0.0, 0.0, 0.0]) == 1  # no prototype yet: the head


# ------------------------------------------------------------------------------------------------------------- whole runs

EPOCH = {"local": {"epochs": 1, "iterations": None, "batch_size": 7, "optimizer": "sgd", "lr": 0.05, "momentum": 0.0}}
ROUNDS = [[0, 1, 2, 3], [1, 3, 4, 5], [0, 1, 6, 7]]


def whole(name, schedule=ROUNDS, stack_size=1, nodes=8, **changes):
    """A run on digits; returns (global model, every node's memory, the strategy)."""
    config = config_of(f"strategy={name}", f"num_nodes={nodes}", "model=mlp", "model.hidden=[12]", "model.projection=[9]")
    config["strategy"] = strategy_settings(name, **{**EPOCH, **changes})
    grid = LocalGrid(nodes, stack_size)
    models, strategy = run_strategy(
        workspace_of(config, dtype=torch.float64), config, Schedule(schedule), len(schedule), grid=grid
    )
    memory = {f"{node}/{name}": tensor for node in grid.memory for name, tensor in grid.memory.get(node).items()}
    return models[-1], memory, strategy


def heads(memory):
    return {n: v for n, v in memory.items() if "/personal/" in n}


@pytest.mark.parametrize("name", PERSONAL)
def test_stacked_equals_one_by_one(name):
    model, memory, _ = whole(name)
    for size in (2, 4):
        other, others, _ = whole(name, stack_size=size)
        close(other, model)
        close(others, memory)


def test_fedcosr_is_fedcrl_bit_for_bit():
    for a, b in zip(whole("fedcrl")[:2], whole("fedcosr")[:2], strict=True):
        assert same(a, b)


def test_fedcrl_without_contrast_and_blend_is_fedper():
    """I1: alpha = 0 and tau = 0."""
    crl, crl_memory, _ = whole("fedcrl", contrast_weight=0.0, blend="global")
    per, per_memory, _ = whole("fedper")
    close(crl, per)
    close(heads(crl_memory), heads(per_memory))


def test_fedcrl_that_keeps_its_own_body_is_local_training():
    """I1: alpha = 0 and tau = 1, everyone from the initial round on."""
    everyone = [range(8)] * 3
    _, crl, _ = whole("fedcrl", everyone, contrast_weight=0.0, blend="own")
    _, local, _ = whole("local", everyone)
    own = {n.replace("/own/", "/personal/"): v for n, v in crl.items() if "/own/" in n or "/personal/" in n}
    close(own, local)


def test_fedcrl_without_separation_contrast_and_blend_is_fedavg():
    crl, _, _ = whole("fedcrl", contrast_weight=0.0, blend="global", separate=False)
    fedavg, _, _ = whole("fedavg")
    close(crl, fedavg)


def test_mpfedcon_without_contrast_is_fedrep():
    """M1."""
    con, con_memory, _ = whole("mpfedcon", contrast_weight=0.0, head_epochs=2)
    rep, rep_memory, _ = whole("fedrep", head="projector_classifier", head_epochs=2)
    close(con, rep)
    close(heads(con_memory), heads(rep_memory))
    other, _, _ = whole("mpfedcon", contrast_weight=1.0, head_epochs=2)
    with pytest.raises(AssertionError):
        close(con, other)


def test_a_loss_is_averaged_over_the_examples_that_had_it():
    """MpFedcon's contrast exists in the body phase alone: the mean must not be thinned by ten head epochs."""
    config = config_of("strategy=mpfedcon", "num_nodes=4", "model=mlp", "model.hidden=[12]", "model.projection=[9]")
    config["strategy"] |= {"invalid_centre": "zero_vector", "head_epochs": 3}
    workspace = workspace_of(config, dtype=torch.float64)
    seen = []

    class Watched(workspace.client_class):
        def before_step(self, stack, losses):
            if "contrast" in losses:
                seen.append(float(losses["contrast"][0]))

    client = Watched(workspace, [0])
    down = dict(zip(client.names("down"), client.get_parameters({}), strict=True))
    config_size = len(workspace.federation.partition.train(0))
    (update,) = client.update([{n: torch.from_numpy(v) for n, v in down.items()}], 1)
    sizes = [min(10, config_size - i) for i in range(0, config_size, 10)]
    assert len(seen) == len(sizes)
    assert update.metrics["contrast"] == pytest.approx(np.average(seen, weights=sizes), rel=1e-9)


def test_each_phase_leaves_the_other_part_as_it_was():
    """M5 and FedRep's: no head epochs leave the heads, no body epochs the body."""
    initial = whole("fedrep", [[]])[0]
    body_only, memory, _ = whole("fedrep", head_epochs=0)
    assert all(torch.equal(v, initial[n.split("personal/")[1]]) for n, v in heads(memory).items())
    assert not same(body_only, initial)
    no_body = {"local": {**EPOCH["local"], "epochs": 0}}
    head_only, memory, _ = whole("fedrep", head_epochs=1, **no_body)
    close(head_only, initial, 1e-12)  # the mean of equal models
    assert any(not torch.equal(v, initial[n.split("personal/")[1]]) for n, v in heads(memory).items())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("head", ["classifier", "projector_classifier"])
def test_encoding_once_changes_nothing(monkeypatch, head, dropout):
    """The head phase over stored encoder outputs equals the one over images, alone and stacked."""
    from clients.fedrep import FedRepClient

    def trained(stack_size):
        config = config_of("strategy=fedrep", "num_nodes=6", "model=cnn", "model.hidden=16", "model.projection=[9]")
        config["model"]["dropout"] = dropout
        config["strategy"] |= {"head": head, "head_epochs": 3}
        config["strategy"]["local"] |= {"batch_size": 7}
        grid = LocalGrid(6, stack_size)
        run_strategy(workspace_of(config, dtype=torch.float64), config, Schedule([range(6)] * 2), 2, grid=grid)
        return {n: v.numpy() for k in range(6) for n, v in grid.memory.get(1000 + k).items()}

    once, stacked = trained(1), trained(3)
    whole = FedRepClient._head_phase
    monkeypatch.setattr(FedRepClient, "_head_phase", lambda self, purpose: replace(whole(self, purpose), encode_once=False))
    plain = trained(1)
    for name in plain:
        np.testing.assert_allclose(once[name], plain[name], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(stacked[name], plain[name], rtol=1e-9, atol=1e-9)


def test_fedproto_without_distance_is_local():
    close(heads(whole("fedproto", prototype_weight=0.0)[1]), whole("local")[1])


def test_local_nodes_know_nothing_of_each_other():
    """Node 1's model does not change with who else trains, and nothing travels."""
    _, alone, strategy = whole("local", [[1]] * 3)
    _, together, _ = whole("local", [range(8)] * 3)
    assert all(torch.equal(v, together[n]) for n, v in alone.items())
    assert strategy.down == strategy.up == {}
    assert strategy.round.bytes_up == strategy.round.bytes_down == 0


def test_fedper_and_lgfedavg_share_complements():
    _, _, fedper = whole("fedper", [[]])
    _, _, lg = whole("lgfedavg", [[]])
    assert not set(fedper.down) & set(lg.down)
    assert set(fedper.down) | set(lg.down) == {f"model/{n}" for n in fedper.model}


@pytest.mark.parametrize("name", ["fedcrl", "fedper", "fedrep", "mpfedcon"])
def test_no_head_ever_travels(name):
    """I10 and M6."""
    _, _, strategy = whole(name, [[]])
    assert not any("classifier" in n for n in (*strategy.down, *strategy.up))
    assert any("projector" in n for n in strategy.up) == (name != "mpfedcon")


def test_the_label_rule_of_gradient_leakage_finds_no_input():
    """M8 (iDLG): one step on one example gives its label away in the classifier's update, which MpFedcon never sends."""
    for name in ("fedavg", "mpfedcon"):
        config = config_of(f"strategy={name}", "num_nodes=4", "model=mlp")
        config["strategy"]["local"] |= {"epochs": None, "iterations": 1, "batch_size": 1, "momentum": 0.0}
        workspace = workspace_of(config, dtype=torch.float64)
        workspace.federation.partition.train = lambda node: np.array([17])
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


def test_pooled_prototypes_are_those_of_the_pooled_data():
    """I7: with one shared body, Equation 6 over nodes is the mean over all their examples."""
    config = config_of("strategy=fedcrl", "num_nodes=4", "model=mlp")
    workspace = workspace_of(config, dtype=torch.float64)
    partition = workspace.federation.partition
    rows = []
    for node in range(4):
        client = workspace.client_class(workspace, [node])
        stack = client._open(
            [{f"model/{n}": v for n, v in workspace.initial.items()}], [{}], [node], [partition.train(node)], 1
        )
        means, counts = client.prototypes(stack)
        rows.append((len(partition.train(node)), counts[0].tolist(), means[0].tolist()))
    table = torch.tensor(merged(rows)[0])
    every = torch.from_numpy(np.concatenate([partition.train(n) for n in range(4)]))
    with torch.no_grad():
        z = workspace.model(workspace.images(every)).z
    labels = workspace.labels(every)
    for label in labels.unique():
        torch.testing.assert_close(table[label], z[labels == label].mean(0).to(table), rtol=1e-5, atol=1e-6)


def test_bytes_match_the_papers_formula():
    """I9: 2 [phi] + 2 [Omega] scalars, beside the counts and validity that the formula leaves out."""
    _, _, strategy = whole("fedcrl", [range(8)])
    body = sum(v.numel() for n, v in strategy.model.items() if "classifier" not in n)
    table = 10 * 9
    assert strategy.round.bytes_down == 8 * 4 * (body + table + 10)
    assert strategy.round.bytes_up == 8 * 8 * (body + table + 10)  # this run is in float64


def test_a_node_that_sat_out_ten_rounds_comes_back_as_it_left():
    _, left, _ = whole("fedcrl", [[0, 1]])
    _, kept, _ = whole("fedcrl", [[0, 1]] + [[1, 2]] * 10)
    mine = {n: v for n, v in left.items() if n.startswith("1000/")}
    assert mine
    assert all(torch.equal(v, kept[n]) for n, v in mine.items())


def test_personal_methods_report_personal_numbers_only(tmp_path):
    config = config_of(
        "strategy=fedcrl", "engine=local", "num_nodes=6", "num_rounds=2", "eval_every=1", "participation=full", "model=mlp",
        "model.hidden=[8]", "dataset.merge_splits=true", f"output_dir={tmp_path}/run",
    )  # fmt: skip
    summary = run(config)
    assert summary["accuracy_final"] is None
    assert 0 < summary["personal_accuracy_mean"] <= summary["personal_accuracy_best"] <= 1
    rows = (tmp_path / "run" / "metrics.csv").read_text()
    assert ",personal,test,accuracy_worst_decile," in rows
    assert ",global,test," not in rows
    assert ",accuracy," in (tmp_path / "run" / "nodes.csv").read_text()


# ------------------------------------------------------------------------------------------------------------ on the wire

WIRE = ("fedavg", "moon", "fedau", "pmfl", "fedrcl", *PERSONAL)


def payload(record):
    """The bytes of a record's arrays as Flower serialises them, without the headers of the .npy files."""
    total = 0
    for array in record.values():
        file = io.BytesIO(array.data)
        version = np.lib.format.read_magic(file)
        getattr(np.lib.format, f"read_array_header_{version[0]}_0")(file)
        total += len(array.data) - file.tell()
    return total


@pytest.mark.parametrize("name", WIRE)
def test_bytes_by_count_equal_what_is_serialised_and_the_papers_formula(name):
    """METHODS section 41.6, in scalars per node and round: both ways, beside validity and counts of prototypes."""
    seen = {"down": 0, "up": 0}

    class Wire:
        def __init__(self, grid):
            self.grid = grid

        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            for reply in (replies := list(self.grid.send_and_receive(messages, timeout=timeout))):
                seen["up"] += payload(reply.content["arrays"])
            seen["down"] += sum(payload(message.content["arrays"]) for message in messages)
            return replies

    config = config_of(f"strategy={name}", "num_nodes=4", "model=mlp", "model.hidden=[12]", "model.projection=[9]")
    workspace = workspace_of(config)
    _, strategy = run_strategy(workspace, config, Schedule([range(3)]), 1, wrap=Wire)
    assert (strategy.round.bytes_down, strategy.round.bytes_up) == (seen["down"], seen["up"])
    sizes = {part: sum(v.numel() for n, v in workspace.initial.items() if n.startswith(part)) for part in PARTS}
    everything, table, extra = sum(sizes.values()), 10 * 9, 10
    one_way = {
        "local": 0,
        "fedper": sizes["encoder"] + sizes["projector"],
        "fedrep": sizes["encoder"] + sizes["projector"],
        "lgfedavg": sizes["classifier"],
        "fedproto": table + extra,
        "mpfedcon": sizes["encoder"] + table + extra,
        "fedcrl": sizes["encoder"] + sizes["projector"] + table + extra,
        "fedcosr": sizes["encoder"] + sizes["projector"] + table + extra,
    }.get(name, everything)
    assert seen == {"down": 3 * 4 * one_way, "up": 3 * 4 * one_way}


def test_the_papers_network_sends_what_the_paper_counts():
    """FedCRL on CIFAR-10: 519,808 scalars both ways, 2 C fewer than FedAvg; beside 2 C of counts and validity."""
    from models.base import build_model

    model = build_model(choose("model", config_of("model=cnn")["model"]), 3, (32, 32), 10, 0)
    counts = {}
    for name in ("fedavg", "fedcrl"):
        strategy = node_run(config_of(f"strategy={name}")).strategy
        messages = client_class_of(strategy).messages(model, strategy.config)
        counts[name] = sum(math.prod(shape) for shapes in messages for shape in shapes.values())
    assert counts == {"fedavg": 519_828, "fedcrl": 519_808 + 2 * 10}


# ---------------------------------------------------------------------------------------------- saving and judging for good

SAVED = (
    "engine=local", "num_nodes=6", "num_rounds=2", "eval_every=1", "participation=uniform", "participation.select=2",
    "model=mlp", "model.hidden=[8]", "model.projection=[5]", "dataset.merge_splits=true",
)  # fmt: skip


def test_the_last_evaluation_refits_every_head(tmp_path):
    """A node that never took part is judged by a trained head, and only then; nothing of it is remembered."""
    scores = {}
    for refresh in (True, False):
        summary = run(
            config_of("strategy=mpfedcon", f"strategy.eval_head_refresh={refresh}", *SAVED, f"output_dir={tmp_path}/{refresh}")
        )
        with open(tmp_path / str(refresh) / "nodes.csv") as file:
            scores[refresh] = {
                (int(r["round"]), int(r["node"])): float(r["value"]) for r in csv.DictReader(file) if r["metric"] == "accuracy"
            }
        assert summary["status"] == "finished"
    assert all(scores[True][1, n] == scores[False][1, n] for n in range(6))
    assert sum(scores[True][2, n] for n in range(6)) > sum(scores[False][2, n] for n in range(6)) + 0.5
    config = config_of("strategy=fedrep", "num_nodes=4", "model=mlp")
    workspace = workspace_of(config)
    client = workspace.client_class(workspace, [0])
    received = {f"model/{n}": v for n, v in workspace.initial.items() if not n.startswith("classifier")}
    memory = client.train_alone(received, {}, 3, client._head_phase("final head batches"))
    assert set(memory) == {"personal/classifier.weight", "personal/classifier.bias"}
    assert not torch.equal(memory["personal/classifier.weight"], workspace.initial["classifier.weight"])
    assert client.memories == [{}]
    untouched = client.refresh(received, memory, 3)
    assert not torch.equal(untouched["personal/classifier.weight"], memory["personal/classifier.weight"])


@pytest.mark.parametrize("name", ["mpfedcon", "fedproto", "fedcrl", "local"])
@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_saved_personal_models_score_what_they_scored(tmp_path, name, engine):
    first = run(config_of(f"strategy={name}", *SAVED, "save_personal=true", f"output_dir={tmp_path}/run"))
    assert sorted(p.name for p in (tmp_path / "run" / "personal").iterdir()) == [f"{n}.safetensors" for n in range(6)]
    again = run(config_of(f"evaluate_only={tmp_path}/run", f"engine={engine}", f"output_dir={tmp_path}/again"))
    for key in ("personal_accuracy_mean", "personal_accuracy_std", "method"):
        assert again[key] == first[key]
    assert again["rounds"] == 0
    rows = [(tmp_path / f / "nodes.csv").read_text().splitlines()[1:] for f in ("run", "again")]
    last = [row.split(",", 1)[1] for row in rows[0] if row.startswith("2,") and ",accuracy," in row]
    assert [row.split(",", 1)[1] for row in rows[1]] == last


def test_saving_changes_no_number_even_for_a_node_without_training_data(tmp_path):
    """Node 2 has a test part alone: it is judged and saved like the others, and its head is never fitted."""
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps({"train": [list(range(60)), list(range(60, 90)), []], "test": [[100, 101], [102], [103, 104]]}))
    part = ("num_nodes=3", "partition=file", f"partition.path={file}", "participation=full")
    shape = [o for o in SAVED if not o.startswith(("participation", "num_nodes"))]
    logs = []
    for save in (False, True):
        folder = tmp_path / str(save)
        run(
            config_of(
                "strategy=fedrep", "strategy.head_epochs=3", *shape, *part, f"save_personal={save}", f"output_dir={folder}"
            )
        )
        logs.append([(folder / name).read_bytes() for name in ("metrics.csv", "nodes.csv")])
    assert logs[0] == logs[1]
    assert b"\n2,2,accuracy," in logs[0][1]
    again = run(config_of(f"evaluate_only={tmp_path}/True", "engine=local", f"output_dir={tmp_path}/again"))
    assert again["status"] == "finished"


def test_a_saved_global_model_scores_what_it_scored(tmp_path):
    first = run(config_of("strategy=fedavg", *SAVED, "dataset.merge_splits=false", f"output_dir={tmp_path}/run"))
    again = run(config_of(f"evaluate_only={tmp_path}/run", "engine=local", f"output_dir={tmp_path}/again"))
    assert again["accuracy_final"] == first["accuracy_final"]


def test_mistakes_about_saved_models_are_one_line(tmp_path):
    with pytest.raises(UserError, match="save_personal: strategy=fedavg has no personal models"):
        run(config_of("strategy=fedavg", *SAVED, "save_personal=true", f"output_dir={tmp_path}/run"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="there is no config.yaml in .*nowhere; give the folder of a finished run"):
        run(config_of("evaluate_only=nowhere"))
    with pytest.raises(UserError, match="so that seed, strategy.local.lr cannot be set beside it"):
        config_of("evaluate_only=nowhere", "seed=1", "strategy.local.lr=1", "engine=local")
    run(config_of("strategy=fedcrl", *SAVED, f"output_dir={tmp_path}/bare"))
    with pytest.raises(UserError, match="no personal model of node 0 in .*; the run needs save_personal=true"):
        run(config_of(f"evaluate_only={tmp_path}/bare", "engine=local", f"output_dir={tmp_path}/again"))
