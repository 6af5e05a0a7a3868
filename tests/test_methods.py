"""The five methods: hand-computed losses and rules, reductions to one another, stacked == one by one."""

import gc
import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rig import (
    METHODS,
    Schedule,
    Vector,
    close,
    config_of,
    digits_run,
    run_scalar,
    run_strategy,
    same,
    scalar_workspace,
    strategy_settings,
    work_of,
    workspace_of,
)

from clients.base import Batch, Stack
from clients.losses import contrast, cosine, cross_entropy, unit
from clients.training.batches import draw_batches
from contrafed.settings import server_of
from core.errors import UserError
from simulation.grid import LocalGrid
from strategies.base import Population, Replies, Reply, Round
from strategies.fedavg import FedAvg
from strategies.intervals import Intervals
from strategies.pmfl import PMFL

# ------------------------------------------------------------------------------------------------------------------ losses


def test_contrast_by_hand():
    """P5: cos(z,Z) = 1, history {0.9, 0.2}, mu = 0.5, T = 0.5: pos = e^2 + e^1.8, neg = e^0.4."""
    scores = torch.tensor([[1.0, 0.9, 0.2]], dtype=torch.float64) / 0.5
    far = torch.tensor([[False, False, True]])
    assert contrast(scores, far).item() == pytest.approx(0.105269, abs=5e-7)
    history = torch.tensor([[False, True, True]])
    assert contrast(scores, history).item() == pytest.approx(0.703408, abs=5e-7)
    assert contrast(scores, far, torch.tensor([False, True, False])).item() == pytest.approx(
        math.log1p(math.exp(0.4 - 2)), abs=5e-7
    )
    # A negative that does not exist counts as little as a positive that does not.
    assert contrast(scores, history, torch.tensor([False, True, True])).item() == 0


def test_contrast_without_negatives_is_exactly_zero_with_zero_gradient():
    scores = torch.tensor([[2.0, 1.8]], requires_grad=True)
    loss = contrast(scores, torch.zeros(1, 2, dtype=torch.bool))
    loss.sum().backward()
    assert loss.item() == 0.0
    assert scores.grad.abs().max().item() == 0.0


def test_cosine_of_a_zero_vector_is_zero_with_a_finite_gradient():
    a = torch.zeros(1, 3, requires_grad=True)
    value = cosine(a, torch.ones(1, 3))
    value.sum().backward()
    assert value.item() == 0.0
    assert torch.isfinite(a.grad).all()


def test_padding_never_touches_a_loss():
    logits, y = torch.randn(4, 5), torch.tensor([0, 1, 2, 3])
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0])
    expected = torch.nn.functional.cross_entropy(logits[:2], y[:2])
    torch.testing.assert_close(cross_entropy(logits, y, mask), expected)
    logits[2:] = 1e4 * torch.randn(2, 5)
    torch.testing.assert_close(cross_entropy(logits, y, mask), expected)


def vector_client(name, w, **changes):
    """A client whose representation of every image is its two parameters."""
    settings = config_of("num_nodes=1") | {"strategy": strategy_settings(name, **changes)}
    workspace = scalar_workspace(settings, Vector(w), targets=(1,))
    return workspace.client_class(workspace, [0])


def batch_of(client, rows=1):
    x = torch.ones(1, rows, 1, 1, 1, dtype=torch.float64)
    return Batch(x, torch.zeros(1, rows, dtype=torch.int64), torch.ones(1, rows, dtype=torch.float64), torch.ones(1))


def loss_of(client, now, received, memory):
    """The named losses of one node at parameters ``now``."""
    tensor = lambda v: torch.tensor([v], dtype=torch.float64)  # noqa: E731
    params = {"classifier.w": tensor(now).requires_grad_()}
    stack = Stack([0], 1, params, {"model/classifier.w": tensor(received)}, memory, torch.ones(1))
    client.start(stack)
    batch = batch_of(client)
    frozen = {name: client.embed(params, batch.x) for name, params in client.frozen_models(stack).items()}
    block = Batch(*[t.unsqueeze(1) for t in batch])
    stack.represented, stack.coming, stack.steps = frozen, Coming(lambda step: (block, [batch.y.shape[1]])), 1
    constants = frozen | client.constants(stack, batch)
    one = Batch(*[t[0] for t in batch])
    losses = client.loss({n: v[0] for n, v in params.items()}, one, {n: v[0] for n, v in constants.items()})
    return losses, params["classifier.w"]


def test_moon_by_hand():
    """cos(z,z_glob) = 1, cos(z,z_prev) = 0, T = 0.5: log(1 + e^-2) = 0.126928."""
    client = vector_client("moon", [1.0, 0.0])
    memory = {"previous/classifier.w": torch.tensor([[0.0, 3.0]], dtype=torch.float64)}
    losses, _ = loss_of(client, [2.0, 0.0], [5.0, 0.0], memory)
    assert losses["contrast"].item() == pytest.approx(0.126928, abs=5e-7)


def test_moon_in_a_first_round_is_ln2_with_no_gradient():
    client = vector_client("moon", [1.0, 0.0])
    memory = client.fresh_memory({"model/classifier.w": torch.tensor([1.0, 2.0], dtype=torch.float64)})
    losses, w = loss_of(client, [2.0, -1.0], [1.0, 2.0], {n: v[None] for n, v in memory.items()})
    assert losses["contrast"].item() == pytest.approx(math.log(2), rel=1e-12)
    (gradient,) = torch.autograd.grad(losses["contrast"], w)
    assert gradient.abs().max().item() < 1e-12


def angle(cos):
    return [cos, math.sqrt(1 - cos**2)]


def pmfl_memory(history, previous=None, pushed=None, rounds=1):
    return {
        "buffer/classifier.w": torch.tensor([history], dtype=torch.float64),
        "previous/classifier.w": torch.tensor([previous or [1.0, 0.0]], dtype=torch.float64),
        "pushed": torch.tensor([len(history) if pushed is None else pushed]),
        "rounds": torch.tensor([rounds]),
    }


def test_pmfl_contrast_by_hand():
    """P5 through the client: z = Z, history cosines 0.9 and 0.2; mu = 0.5 (constant) and mu = 1 (literal)."""
    memory = pmfl_memory([angle(0.9), angle(0.2)])
    constant = vector_client("pmfl", [1.0, 0.0], buffer_size=2, threshold="constant", threshold_value=0.5)
    losses, _ = loss_of(constant, [1.0, 0.0], [1.0, 0.0], memory)
    assert losses["contrast"].item() == pytest.approx(0.105269, abs=5e-7)
    literal = vector_client("pmfl", [1.0, 0.0], buffer_size=2, threshold="literal")
    losses, _ = loss_of(literal, [1.0, 0.0], [1.0, 0.0], memory)
    assert losses["contrast"].item() == pytest.approx(0.703408, abs=5e-7)


def test_pmfl_threshold_readings_differ_as_they_should():
    history = [angle(0.9), angle(0.2)]
    values = {}
    for reading in ("previous", "node", "current", "literal"):
        client = vector_client("pmfl", [1.0, 0.0], buffer_size=2, threshold=reading)
        losses, _ = loss_of(client, [1.0, 0.0], angle(0.5), pmfl_memory(history, previous=[1.0, 0.0]))
        values[reading] = losses["contrast"].item()
    e = lambda c: math.exp(c / 0.5)  # noqa: E731
    # mu = cos(previous, Z) = 0.5: 0.9 is near, 0.2 is not; one example, so the node's mean is the same.
    assert values["previous"] == pytest.approx(math.log((e(0.5) + e(0.9) + e(0.2)) / (e(0.5) + e(0.9))), rel=1e-9)
    assert values["node"] == pytest.approx(values["previous"], rel=1e-12)
    assert values["current"] == pytest.approx(values["previous"], rel=1e-9)  # cos(z, Z) is 0.5 as well
    assert values["literal"] == pytest.approx(math.log((e(0.5) + e(0.9) + e(0.2)) / e(0.5)), rel=1e-9)


def test_pmfl_first_round_falls_back_to_the_literal_threshold():
    memory = pmfl_memory([angle(0.9), angle(0.2)], previous=[0.0, 1.0], rounds=0)
    client = vector_client("pmfl", [1.0, 0.0], buffer_size=2)
    losses, _ = loss_of(client, [1.0, 0.0], [1.0, 0.0], memory)
    assert losses["contrast"].item() == pytest.approx(0.703408, abs=5e-7)


def test_pmfl_with_an_empty_buffer_or_a_threshold_of_minus_one_is_exactly_zero():
    empty = vector_client("pmfl", [1.0, 0.0], buffer_size=2)
    losses, _ = loss_of(empty, [1.0, 0.0], angle(0.5), pmfl_memory([angle(0.9), angle(0.2)], pushed=0))
    assert losses["contrast"].item() == 0.0
    everything = vector_client("pmfl", [1.0, 0.0], buffer_size=2, threshold="constant", threshold_value=-1.0)
    losses, _ = loss_of(everything, [1.0, 0.0], angle(0.5), pmfl_memory([angle(0.9), angle(0.2)]))
    assert losses["contrast"].item() == 0.0


def test_pmfl_literal_with_one_previous_model_is_moons_loss():
    """P3: same weight, the buffer holding only the previous local model."""
    pmfl = vector_client("pmfl", [1.0, 0.0], buffer_size=1, threshold="literal", contrast_weight=0.7)
    moon = vector_client("moon", [1.0, 0.0], contrast_weight=0.7)
    now, received, previous = [0.3, 1.1], [1.0, 0.4], [-0.2, 0.9]
    ours, w = loss_of(pmfl, now, received, pmfl_memory([previous]))
    theirs, v = loss_of(moon, now, received, {"previous/classifier.w": torch.tensor([previous], dtype=torch.float64)})
    assert ours["loss"].item() == pytest.approx(theirs["loss"].item(), rel=1e-12)
    ours["loss"].backward()
    theirs["loss"].backward()
    torch.testing.assert_close(w.grad, v.grad, rtol=1e-12, atol=1e-12)


def test_pmfl_buffer_holds_the_last_iterates_across_rounds():
    """N = 3, two steps a round: after rounds 1 and 2 it holds iterates 1, 2 and 3 of the four that steps started from."""
    strategy = strategy_settings("pmfl", buffer_size=3, local={"iterations": 2, "batch_size": 1, "lr": 0.1})
    workspace = scalar_workspace({"seed": 0, "num_nodes": 1, "strategy": strategy}, Vector([1.0, 2.0]), targets=(3,))
    client = workspace.client_class(workspace, [0])
    iterates = []
    watch = client.before_step
    client.before_step = lambda stack, losses: (
        iterates.append(stack.params["classifier.w"][0].detach().clone()),
        watch(stack, losses),
    )
    received = {"model/classifier.w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    for server_round in (1, 2):
        (update,) = client.update([received], server_round)
        client.memories = [update.memory]
    assert update.memory["pushed"].item() == 4
    held = {tuple(row.tolist()) for row in update.memory["buffer/classifier.w"]}
    assert held == {tuple(i.tolist()) for i in iterates[1:]}
    torch.testing.assert_close(
        update.memory["previous/classifier.w"], received["model/classifier.w"] + update.tensors["delta/classifier.w"]
    )


@pytest.mark.parametrize("stack_size", [1, 3])
def test_gradients_are_whole_in_their_parameters_layout_and_gone_after_the_step(stack_size):
    """Autograd may return one tensor for two parameters, a broadcast one or one in another layout; clipping writes in place."""
    config = config_of("strategy=fedavg", "num_nodes=3", "model=cnn_pmfl", "model.hidden=[8]", "strategy.local.clip_norm=0.01")
    workspace, seen = workspace_of(config, dtype=torch.float64), []

    class Shared(workspace.client_class):
        def loss(self, params, batch, constants):
            stages = [params[f"encoder.stages.{layer}.bias"] for layer in (0, 1)]
            return {"loss": (stages[0] + stages[1]).sum() + super().loss(params, batch, constants)["loss"]}

        def before_step(self, stack, losses):
            gradients = [value.grad for value in stack.params.values()]
            norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0).sqrt()
            layouts = [(value.stride(), value.grad.stride()) for value in stack.params.values()]
            seen.append((stack, norms, layouts, len({gradient.data_ptr() for gradient in gradients})))

    client = Shared(workspace, range(stack_size))
    client.update([{f"model/{name}": value for name, value in workspace.initial.items()}] * stack_size, 1)
    assert seen
    for stack, norms, layouts, apart in seen:
        torch.testing.assert_close(norms, torch.full_like(norms, 0.01), rtol=1e-3, atol=0)
        # Where there is one node, the stride of the node axis means nothing.
        assert all(value[1:] == gradient[1:] for value, gradient in layouts)
        assert apart == len(layouts)
        assert all(value.grad is None for value in stack.params.values())


# ------------------------------------------------------------------------------------------------------------ server rules


@pytest.mark.parametrize("stack_size", [1, 2])
@pytest.mark.parametrize(
    "local", [{"iterations": 7}, {"iterations": None, "epochs": 2, "batch_size": 50}], ids=["steps", "epochs"]
)
@pytest.mark.parametrize(("scope", "size"), [("across", 3), ("within", 3), ("across", 60)])
def test_pmfl_compares_with_what_its_buffer_holds(scope, size, local, stack_size):
    """Representations made ahead, against embedding the received model and every slot of the buffer anew at each step.

    Nodes of unequal size take part unequally often: a stack has buffers of different fill, and the one that fills last stays
    longest.
    """
    config = config_of("strategy=pmfl", "num_nodes=3", "model=mlp", "model.hidden=[8]", f"strategy.buffer_scope={scope}")
    config["strategy"] |= {"buffer_size": size}
    config["strategy"]["local"] |= local
    workspace, steps, pairs = workspace_of(config, dtype=torch.float64), [], []

    class Watched(workspace.client_class):
        def constants(self, stack, batch):
            # What fails in here fails a node, not the test.
            found = super().constants(stack, batch)
            pushed, rows = stack.memory["pushed"], torch.arange(len(stack))
            ages = range(1, min(size, int(pushed.max())) + 1)
            models = [self.global_model(stack)]
            models += [{n: stack.memory[f"buffer/{n}"][rows, (pushed - age) % size] for n in stack.params} for age in ages]
            anew = torch.stack([unit(self.embed(model, batch.x)) for model in models], dim=2)
            there = torch.tensor([[True] + [age <= int(count) for age in ages] for count in pushed])
            steps.append((stack.step, len(stack)))
            pairs.append((~found["missing"] if "missing" in found else torch.ones_like(there), there))
            pairs.append((found["history"], torch.tensor([False] + [True] * len(ages)).expand_as(there)))
            real = there[:, None, :, None] * batch.mask[..., None, None]
            pairs.append((found["directions"] * real, anew * real))
            return found

    workspace.client_class = Watched
    run_strategy(workspace, config, Schedule([[0, 2], [0, 1], [1, 2], [0, 1, 2]]), 4, stack_size=stack_size)
    sizes = [len(workspace.federation.partition.train(node)) for node in range(3)]
    assert len(set(sizes)) > 1
    assert {step for step, _ in steps} == set(range(max(map(workspace.config.local.steps, sizes))))
    assert {alive for _, alive in steps} >= {1, stack_size}
    for found, anew in pairs:
        torch.testing.assert_close(found, anew, rtol=0, atol=1e-12)


def test_pmfl_asks_each_frozen_model_once_for_all_steps_that_need_it():
    """Five steps and five iterates: 5 old ones, 3 new ones, the received and the previous model, instead of 31 passes."""
    config = config_of("strategy=pmfl", "num_nodes=1", "model=mlp", "model.hidden=[8]", "strategy.local.iterations=5")
    workspace = workspace_of(config)
    calls, held = [], []

    class Counted(workspace.client_class):
        def _represent(self, params, x):
            calls.append(len(x))
            return super()._represent(params, x)

        def before_step(self, stack, losses):
            held.append(weakref.ref(stack))
            super().before_step(stack, losses)

    client, received = Counted(workspace, [0]), {f"model/{n}": v for n, v in workspace.initial.items()}
    gc.disable()  # what a round leaves behind in a cycle is 12 models, until some collection
    try:
        for server_round in (1, 2):
            calls.clear()
            (update,) = client.update([received], server_round)
            client.memories = [update.memory]
            assert {stack() for stack in held} == {None}
    finally:
        gc.enable()
    batch = config["strategy"]["local"]["batch_size"]
    assert sorted(calls) == [batch * steps for steps in (1, 1, 2, 2, 3, 3, 4, 5, 5, 5)]


@pytest.mark.parametrize("stack_size", [1, 2])
def test_moon_represents_an_example_once_a_round_and_means_the_same(stack_size):
    """Three epochs with looked-up representations, against embedding every batch anew."""
    config = config_of("strategy=moon", "num_nodes=3", "model=mlp", "model.hidden=[8]", "partition.min_node_size=5")
    config["strategy"]["local"] |= {"iterations": None, "epochs": 3}
    workspace, calls = workspace_of(config, dtype=torch.float64), {"often": 0, "once": 0}
    once = workspace.client_class

    class Counted(once):
        kind = "once"

        def _represent(self, params, x):
            calls[self.kind] += len(x)
            return super()._represent(params, x)

    class Often(Counted):
        kind = "often"

        def frozen_models(self, stack):
            return {}

        def constants(self, stack, batch):
            return {name: self.embed(params, batch.x) for name, params in once.frozen_models(self, stack).items()}

    models = []
    for kind in (Counted, Often):
        workspace.client_class = kind
        models.append(run_strategy(workspace, config, Schedule([[0, 1, 2], [0, 2], [1]]), 3, stack_size=stack_size)[0][-1])
    assert 2 * calls["once"] < calls["often"]
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=0, atol=1e-10)


def test_a_weighted_sum_takes_one_group_of_tensors_and_a_weight_for_each_reply():
    x = torch.tensor([1.0, 2.0])
    replies = Replies(Reply(k, {"delta/w": (k + 1) * x, "other/w": x}, 1, {}) for k in (2, 0))
    assert same(replies.weighted_sum("delta", np.array([8.0, 0.25])), {"w": 8.75 * x.double()})
    with pytest.raises(ValueError, match="3 weights for 2 replies"):
        replies.weighted_sum("delta", np.ones(3))
    with pytest.raises(ValueError, match="no replies"):
        Replies([]).weighted_sum("delta", np.ones(0))


def weights_along(path, cutoff, lag):
    """The weight of one node in each round in which it takes part."""
    intervals = Intervals(1, cutoff, lag, {})
    weights = []
    for here in path:
        got = intervals.tick(np.array([0] if here else [], dtype=np.int64))
        if here:
            weights.append(float(got[0]))
    return weights


def test_interval_weights_by_hand():
    """P6 and P7."""
    path = [1, 0, 0, 1, 0, 0, 0, 1]
    assert weights_along(path, 50, False) == pytest.approx([1, 2, 8 / 3])
    assert weights_along(path, 3, False) == pytest.approx([1, 2, 2])
    assert weights_along(path, 50, True) == pytest.approx([1, 1, 2])
    assert weights_along(path, 3, True) == pytest.approx([1, 1, 7 / 3])
    assert weights_along([0, 0, 1, 1, 0], 50, False) == pytest.approx([3, 2])
    assert weights_along([1, 0, 1, 1, 0, 0, 1], 1, True) == pytest.approx([1] * 4)  # FedAU, C = 1: average_all


def test_interval_weights_approach_one_over_p():
    # Every fourth round: omega -> 4.
    assert weights_along([0, 0, 0, 1] * 50, 50, True)[-1] == pytest.approx(4)
    rng = np.random.default_rng(0)
    path = rng.random(40_000) < 0.1
    # (1 - (1 - p)^C) / p = 9.9485 for p = 0.1, C = 50 (METHODS 4.2)
    assert weights_along(path, 50, False)[-1] == pytest.approx(9.9485, rel=0.03)


def server(config_changes, num_nodes=4, num_rounds=5, name="pmfl"):
    """A PMFL server half without a network around it."""
    config = server_of(strategy_settings(name, **config_changes)).config
    model = torch.nn.Module()
    client_class = SimpleNamespace(
        messages=lambda model, config: ({"model/w": (1,)}, {"delta/w": (1,)}), is_personal=lambda config: False
    )
    population = Population(np.ones(num_nodes, dtype=np.int64), np.arange(1000, 1000 + num_nodes))
    return PMFL(
        config,
        client_class=client_class,
        node_config=None,
        model=model,
        population=population,
        participation=Schedule([]),
        settings="",
        num_rounds=num_rounds,
        seed=0,
    )


def aggregate(strategy, t, w, deltas):
    strategy.round = Round(t + 1, np.zeros(0, dtype=np.int64))
    replies = Replies(Reply(k, {"delta/w": torch.tensor([d])}, 1, {}) for k, d in deltas.items())
    return float(strategy.aggregate({"w": torch.tensor([float(w)], dtype=torch.float64)}, replies)["w"])


def test_pmfl_server_rule_by_hand():
    """P10: K = 4, Delta_1 = 1 with x = 4, Delta_2 = -2 with x = 1: W + (4 - 2)/4. The paper's literal formula: W - 2."""
    for changes, expected in (
        ({}, 10.5),
        ({"sign": "paper", "normalize": "none"}, 8.0),
        ({"normalize": "participants"}, 11.0),
        ({"normalize": "weights"}, 10.4),
        ({"adaptive_weights": False}, 9.5),
    ):
        rule = server({"history_size": 0, **changes})
        for t in range(3):
            aggregate(rule, t, 10.0, {1: 0.0})
        assert aggregate(rule, 3, 10.0, {0: 1.0, 1: -2.0}) == pytest.approx(expected), changes


def test_pmfl_history_by_hand():
    """P9: W^{t-1} = 2, W^{t-2} = 4, W^t = 6, mean update 1, psi = 0.5, H = 3: 0.5 * 7 + 0.25 * (2 + 4) = 5."""
    rule = server({"history_size": 3}, num_nodes=1, num_rounds=10**9)  # psi stays 0.5 to nine digits
    aggregate(rule, 0, 4.0, {})
    aggregate(rule, 1, 2.0, {})
    rule.state["mean"][:], rule.state["ended"][:], rule.state["waited"][:] = 1, 1, 0
    assert aggregate(rule, 2, 6.0, {0: 1.0}) == pytest.approx(5.0, abs=1e-6)


def test_pmfl_history_coefficient():
    """P8: T = 5 gives 0.5, 0.375, 0.25, 0.125, 0; seen through an update of 0 onto a history of 1."""
    got = []
    for t in range(5):
        rule = server({"history_size": 2}, num_rounds=5)
        rule.state["history"] = [{"w": torch.tensor([1.0], dtype=torch.float64)}]
        got.append(aggregate(rule, t, 0.0, {}))
    assert got == pytest.approx([0.5, 0.375, 0.25, 0.125, 0])
    single = server({"history_size": 2}, num_rounds=1)
    single.state["history"] = [{"w": torch.tensor([1.0])}]
    assert aggregate(single, 0, 0.0, {}) == 0.0  # T = 1 divides by zero in the paper: psi = 0


def test_pmfl_history_warmup():
    """Round t = 1 of H = 4 with one older model, 8: available uses it, wait does not, pad adds W^0 = 8 twice."""
    for warmup, expected in (("available", 8.0), ("wait", 0.0), ("pad", 8.0)):
        rule = server({"history_size": 4, "history_warmup": warmup}, num_rounds=10**9)
        first = aggregate(rule, 0, 8.0, {})
        assert first == pytest.approx(8.0)
        assert aggregate(rule, 1, 0.0, {}) == pytest.approx(expected / 2, abs=1e-6), warmup


def test_pmfl_constant_history_stays():
    """P11: no update and a constant history leave W where it is for any psi."""
    rule = server({"history_size": 5}, num_rounds=7)
    for t in range(7):
        assert aggregate(rule, t, 3.0, {}) == pytest.approx(3.0, rel=1e-15)


def test_history_of_one_is_off():
    rule = server({"history_size": 1})
    aggregate(rule, 0, 100.0, {})
    assert aggregate(rule, 1, 0.0, {}) == 0.0


def test_fedavg_weights_by_hand():
    """n = (1, 3), w = (0, 4): by samples 3, uniform 2."""
    replies = Replies([Reply(1, {"model/w": torch.tensor([4.0])}, 3, {}), Reply(0, {"model/w": torch.tensor([0.0])}, 1, {})])
    for weights, expected in (("samples", 3.0), ("uniform", 2.0)):
        rule = FedAvg.__new__(FedAvg)
        rule.config = SimpleNamespace(weights=weights)
        assert float(rule.aggregate({"w": torch.zeros(1)}, replies)["w"]) == expected


def test_mean_of_equal_models_is_that_model():
    """G5, and G4: the order of replies does not change a bit."""
    rng = np.random.default_rng(1)
    rows = [Reply(k, {"model/w": torch.from_numpy(rng.normal(size=50)).float()}, k + 1, {}) for k in range(7)]
    weights = rng.random(7)
    forward, backward = Replies(rows), Replies(reversed(rows))
    assert torch.equal(forward.mean("model", weights)["w"], backward.mean("model", weights)["w"])
    equal = Replies(Reply(k, {"model/w": torch.full((5,), 0.1)}, 1, {}) for k in range(7))
    torch.testing.assert_close(equal.mean("model", weights)["w"].float(), torch.full((5,), 0.1), rtol=1e-7, atol=0)


# -------------------------------------------------------------------------------------------------------------- reductions


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fedprox", {"proximal_weight": 0.0}),
        ("moon", {"contrast_weight": 0.0}),
        ("fedavgm", {"server_momentum": 0.0}),
        ("fedagm", {"server_momentum": 0.0, "local": {"proximal_weight": 0.0}}),
        ("fedau", {}),  # at full participation every interval is 1
        ("pmfl", {"contrast_weight": 0.0, "history_size": 0, "adaptive_weights": False}),
        ("pmfl", {"contrast_weight": 0.0, "history_size": 0}),  # x = 1 at full participation
        ("pmfl", {"buffer_size": 0, "history_size": 0}),  # P2: no buffer, no contrast
        ("pmfl", {"threshold": "constant", "threshold_value": -1.0, "history_size": 0}),  # P4
    ],
)
def test_neutral_settings_equal_fedavg(name, changes):
    weights = {"weights": "uniform"} if name in ("fedprox", "moon", "fedavgm", "fedagm") else {}
    reference, _ = digits_run("fedavg", weights="uniform")
    models, _ = digits_run(name, **weights, **changes)
    close(models[-1], reference[-1])


def test_pmfl_without_its_parts_and_with_lagged_weights_is_fedau():
    schedule = [[0, 1, 2], [], [1, 5], [0, 3], [2, 5, 7]]
    pmfl, _ = digits_run("pmfl", 5, schedule=schedule, contrast_weight=0.0, history_size=0, interval_lag=True, cutoff=3)
    fedau, _ = digits_run("fedau", 5, schedule=schedule, cutoff=3)
    close(pmfl[-1], fedau[-1])


def test_fedprox_first_step_is_fedavgs_for_any_weight():
    one_step = {"local": {"iterations": 1}}
    fedavg, _ = digits_run("fedavg", 1, **one_step)
    fedprox, _ = digits_run("fedprox", 1, proximal_weight=100.0, **one_step)
    close(fedavg[-1], fedprox[-1])


def test_fedprox_step_by_hand():
    """w = 3, W = 1, g = 0.5, mu = 0.1, eta = 0.1: 3 - 0.1 (0.5 + 0.1 * 2) = 2.93."""
    client = vector_client("fedprox", [1.0, 1.0], proximal_weight=0.1)
    losses, w = loss_of(client, [3.0, 1.0], [1.0, 1.0], {})
    (gradient,) = torch.autograd.grad(losses["loss"] - losses["task"], w)
    assert (3 - 0.1 * (0.5 + gradient[0, 0])).item() == pytest.approx(2.93)


def test_moons_first_round_is_fedavgs():
    fedavg, _ = digits_run("fedavg", 1)
    moon, _ = digits_run("moon", 1)
    close(fedavg[-1], moon[-1])
    fedavg, _ = digits_run("fedavg", 2)
    moon, _ = digits_run("moon", 2)
    with pytest.raises(AssertionError):
        close(fedavg[-1], moon[-1])


def test_full_batch_single_step_equals_pooled_gradient_descent():
    """G2: one full-batch step weighted by samples is one step on the pooled mean loss."""
    whole = {"local": {"iterations": 1, "batch_size": 10_000}}
    many, _ = digits_run("fedavg", 1, **whole)
    config_workspace = digits_run("fedavg", 1, nodes=1, **whole)[0]
    close(many[-1], config_workspace[-1])


@pytest.mark.parametrize("name", METHODS)
def test_no_learning_leaves_the_model(name):
    """G3, with histories and buffers of constants."""
    models, _ = digits_run(name, 3, local={"lr": 1e-300})
    close(models[0], models[-1], 1e-12)


# ------------------------------------------------------------------------------------------------------------------ stacks


@pytest.mark.parametrize("local", [{}, {"iterations": None, "epochs": 2, "batch_size": 7}])
@pytest.mark.parametrize("name", METHODS)
def test_stacked_equals_one_by_one(name, local):
    """Nodes of unequal size: with epochs they leave the stack at different steps and have short batches."""
    schedule = [[0, 1, 2, 3], [1, 3, 4, 5], [0, 1, 6, 7]]
    alone, _ = digits_run(name, 3, schedule=schedule, local=local)
    for size in (2, 4):
        stacked, _ = digits_run(name, 3, schedule=schedule, local=local, stack_size=size)
        close(stacked[-1], alone[-1])


@pytest.mark.parametrize(
    "changes", [{"optimizer": "adam", "lr": 0.01}, {"momentum": 0.9, "weight_decay": 0.01}, {"clip_norm": 0.5}]
)
def test_stacked_equals_one_by_one_with_every_optimiser(changes):
    local = {"iterations": None, "epochs": 1, "batch_size": 7, **changes}
    alone, _ = digits_run("pmfl", 2, local=local)
    stacked, _ = digits_run("pmfl", 2, local=local, stack_size=8)
    close(stacked[-1], alone[-1])


def test_stacked_dropout_sees_the_masks_that_each_node_alone_sees():
    results = []
    for stack_size in (1, 4):
        config = config_of("strategy=fedavg", "num_nodes=4", "model=cnn", "model.hidden=16", "model.dropout=0.3")
        config["strategy"]["local"] |= {"iterations": None, "epochs": 1, "batch_size": 9}
        models, _ = run_strategy(
            workspace_of(config, dtype=torch.float64), config, Schedule([range(4)] * 2), 2, stack_size=stack_size
        )
        results.append(models[-1])
    close(*results)
    config["model"]["dropout"] = 0.0
    models, _ = run_strategy(workspace_of(config, dtype=torch.float64), config, Schedule([range(4)] * 2), 2)
    with pytest.raises(AssertionError):
        close(models[-1], results[0])


def test_clipping_bounds_each_nodes_gradient():
    """One SGD step of lr 1 moves a node by exactly the clip norm when its gradient is larger."""
    models, _ = digits_run("fedavg", 1, nodes=1, local={"iterations": 1, "lr": 1.0, "clip_norm": 0.01})
    moved = torch.cat([(models[1][n] - models[0][n]).flatten() for n in models[0]]).norm().item()
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_learning_rate_decays_per_round():
    """lr at round 501 is 0.1 * 0.998^500 = 0.0367512 (F7)."""
    work = work_of(epochs=1, batch_size=1, lr_decay=0.998)
    optimizer = work.optimizer_for([torch.zeros(1, requires_grad=True)], 501)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0367512, rel=1e-5)


def test_batches_of_epochs_and_iterations():
    examples = np.arange(100, 110)
    epochs = work_of(epochs=2, batch_size=4).batches(examples, np.random.default_rng(0))
    assert [len(b) for b in epochs] == [4, 4, 2, 4, 4, 2]
    assert sorted(np.concatenate(epochs[:3])) == sorted(np.concatenate(epochs[3:])) == list(examples)
    steps = work_of(iterations=5, batch_size=4).batches(examples, np.random.default_rng(0))
    assert [len(b) for b in steps] == [4] * 5
    assert len(set(np.concatenate(steps[:2]))) == 8  # within a pass nothing repeats
    small = work_of(iterations=3).batches(examples, np.random.default_rng(0))
    assert [len(b) for b in small] == [10] * 3
    share = work_of(epochs=1, batch_size=0.25)
    assert [len(b) for b in share.batches(examples, np.random.default_rng(0))] == [3, 3, 3, 1]  # ceil(10 / 4)
    assert (share.steps(10), work_of(epochs=5, batch_size=0.1).steps(500)) == (4, 50)
    assert [work_of(epochs=1, batch_size=0.07).batch_of(n) for n in (100, 101)] == [7, 8]


def test_the_optimisers_of_one_by_one_nodes_and_of_stacks_agree():
    """Per-node optimisers (own clocks) with nothing to differ in equal the stacked one."""
    local = {"iterations": None, "epochs": 2, "batch_size": 7, "optimizer": "adam", "lr": 0.01}
    plain, _ = digits_run("fedavg", 2, stack_size=4, local=local)
    nearly = digits_run("fedavg", 2, stack_size=4, local=local | {"epoch_lr_decay": 1 - 1e-16})[0]
    close(plain[-1], nearly[-1])
    decayed, _ = digits_run("fedavg", 2, stack_size=4, local=local | {"epoch_lr_decay": 0.5})
    with pytest.raises(AssertionError):
        close(plain[-1], decayed[-1])


def test_learning_rate_decays_per_local_epoch():
    """w = 2, a = 0, two passes over one example: 2 (1 - 0.1) (1 - 0.05) = 1.71."""
    values = run_scalar("fedavg", [[0]], targets=(0,), local={"epoch_lr_decay": 0.5})
    assert values == pytest.approx([1.71], rel=1e-12)


def test_proximal_weight_by_hand():
    """w: 2 -> 1.8; then gradient 1.8 + 0.5 * (1.8 - 2) = 1.7, so 1.63: mu/2 |w - W|^2, FedProx's own key to the last bit."""
    values = run_scalar("fedavg", [[0]], targets=(0,), local={"proximal_weight": 0.5})
    assert values == pytest.approx([1.63], rel=1e-12)
    for rounds in ([[0]], [[0, 1], [2], [0, 1, 2]]):
        fedprox = run_scalar("fedprox", rounds, proximal_weight=0.5)
        assert run_scalar("fedavg", rounds, local={"proximal_weight": 0.5}) == pytest.approx(fedprox, rel=1e-14)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_kept_optimisers_go_on_where_they_were(optimizer):
    """One node, two rounds of two steps: with its optimiser kept it is one run of four steps."""
    local = {"optimizer": optimizer, "momentum": 0.9, "keep_optimizer": True}
    kept = run_scalar("fedavg", [[0]] * 2, targets=(0,), local=local)
    w = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    whole = torch.optim.Adam([w], 0.1) if optimizer == "adam" else torch.optim.SGD([w], 0.1, 0.9)
    for _ in range(4):
        w.grad = w.detach().clone()
        whole.step()
    assert kept[-1] == pytest.approx(w.item(), rel=1e-12)
    again = run_scalar("fedavg", [[0]] * 2, targets=(0,), local=local | {"keep_optimizer": False})
    assert again[-1] != pytest.approx(w.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["fedavg", "fedcrl", "fedrep"])
def test_kept_optimisers_stack(name):
    """Nodes that come for the first time share a stack with others that have state; their numbers of steps differ."""
    local = {"iterations": None, "epochs": 1, "batch_size": 7, "optimizer": "adam", "lr": 0.01, "keep_optimizer": True}
    schedule = [[0, 1, 2], [1, 3, 4, 5], [0, 1, 6, 5]]
    alone, _ = digits_run(name, 3, schedule=schedule, local=local)
    stacked, _ = digits_run(name, 3, schedule=schedule, local=local, stack_size=4)
    close(stacked[-1], alone[-1])


def test_exactly_one_of_epochs_and_iterations():
    for epochs, iterations in ((1, 5), (None, None)):
        with pytest.raises(UserError, match="exactly one"):
            work_of(epochs=epochs, iterations=iterations)


# --------------------------------------------------------------------------------------------------------- memory and names


@pytest.mark.parametrize("name", METHODS)
def test_messages_hold_what_is_declared_and_nothing_else(name):
    seen = []

    class Spy:
        def __init__(self, grid):
            self.grid = grid

        def __getattr__(self, attribute):
            return getattr(self.grid, attribute)

        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            replies = list(self.grid.send_and_receive(messages, timeout=timeout))
            seen.extend(zip(messages, replies, strict=True))
            return replies

    config = config_of(f"strategy={name}", "num_nodes=3", "model=mlp")
    workspace = workspace_of(config)
    run_strategy(workspace, config, Schedule([range(3)] * 2), 2, wrap=Spy)
    shapes = {n: tuple(p.shape) for n, p in workspace.initial.items()}
    group = "delta" if name == "pmfl" else "model"
    assert len(seen) == 6
    for message, reply in seen:
        assert set(message.content) == {"arrays", "config"}
        assert {n: tuple(a.shape) for n, a in message.content["arrays"].items()} == {f"model/{n}": s for n, s in shapes.items()}
        assert set(message.content["config"]) == {"server-round", "settings", "cost"}
        assert set(reply.content) == {"arrays", "metrics"}
        assert {n: tuple(a.shape) for n, a in reply.content["arrays"].items()} == {f"{group}/{n}": s for n, s in shapes.items()}


@pytest.mark.parametrize(
    ("name", "stateless"), [("fedavg", True), ("fedprox", True), ("fedau", True), ("moon", False), ("pmfl", False)]
)
def test_only_declared_memory_is_kept(name, stateless):
    config = config_of(f"strategy={name}", "num_nodes=4", "model=mlp")
    grid = LocalGrid(4, 1)
    workspace = workspace_of(config)
    run_strategy(workspace, config, Schedule([[0, 2], [2]]), 2, grid=grid)
    assert set(grid.memory) == (set() if stateless else {1000, 1002})
    assert workspace.client_class.remembers(workspace.model, workspace.config) == (not stateless)


def test_a_node_that_sat_out_has_the_memory_it_left_with():
    config = config_of("strategy=pmfl", "num_nodes=3", "model=mlp")
    first, later = LocalGrid(3, 1), LocalGrid(3, 1)
    run_strategy(workspace_of(config), config, Schedule([[0, 1]]), 1, grid=first)
    run_strategy(workspace_of(config), config, Schedule([[0, 1]] + [[1, 2]] * 10), 11, grid=later)
    left, kept = (grid.memory.get(1000) for grid in (first, later))
    assert set(left) == set(kept)
    assert all(np.array_equal(left[n].numpy(), kept[n].numpy()) for n in left)


def test_same_seed_same_run_and_methods_share_their_batches():
    a, b = digits_run("pmfl", 2)[0], digits_run("pmfl", 2)[0]
    assert same(a[-1], b[-1])
    work = work_of(iterations=5)
    draws = [draw_batches(work, np.arange(40), 3, "batches", 7, 2) for _ in range(2)]
    assert all(np.array_equal(x, y) for x, y in zip(*draws, strict=True))
    other = draw_batches(work, np.arange(40), 3, "batches", 8, 2)
    assert not np.array_equal(draws[0][0], other[0])
