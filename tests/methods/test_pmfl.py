"""PMFL: its contrast and its strategy by hand, its buffer, the golden runs, and its special cases."""

import gc
import math
import weakref

import pytest
import torch
from hand import client_of
from helpers import (
    FULL_COHORTS,
    Schedule,
    Vector,
    close,
    config_of,
    digits_run,
    run_scalar,
    run_strategy,
    scalar_workspace,
    slow,
    strategy_settings,
    workspace_of,
)
from step import loss_of

from contrafed.training.client_stack import each_image
from contrafed.training.losses import unit

STEPS, EPOCHS = {"iterations": 7}, {"iterations": None, "epochs": 2, "batch_size": 12}
PLAIN_SETTINGS = {"contrast_weight": 0.0}


def angle(cos):
    return [cos, math.sqrt(1 - cos**2)]


def pmfl_memory(history, previous=None, pushed=None, rounds=1):
    return {
        "iterates/classifier.w": torch.tensor([history], dtype=torch.float64),
        "previous/classifier.w": torch.tensor([previous or [1.0, 0.0]], dtype=torch.float64),
        "num_pushed": torch.tensor([len(history) if pushed is None else pushed]),
        "participations": torch.tensor([rounds]),
    }


def test_contrast_by_hand():
    """P5 through the client: z = Z and history cosines 0.9 and 0.2, with mu = 0.5 (constant) and mu = 1 (literal)."""
    memory = pmfl_memory([angle(0.9), angle(0.2)])
    constant = client_of("pmfl", buffer_size=2, threshold="constant", threshold_value=0.5)
    losses, _ = loss_of(constant, [1.0, 0.0], [1.0, 0.0], memory)
    assert losses["contrast"].item() == pytest.approx(0.105269, abs=5e-7)
    literal = client_of("pmfl", buffer_size=2, threshold="literal")
    losses, _ = loss_of(literal, [1.0, 0.0], [1.0, 0.0], memory)
    assert losses["contrast"].item() == pytest.approx(0.703408, abs=5e-7)


def test_threshold_readings_differ_as_they_should():
    """mu is cos(previous, Z) = 0.1, cos(z, Z) = 0.5, or 1.

    The cosine -0.3 is below the first, and 0.2 is below the second too. The cosine of previous and z is 0.91. e^(c/0.5) of 0.5,
    0.9, 0.2 and -0.3 sum to 2.71828 + 6.04965 + 1.49182 + 0.54881 = 10.80857.
    """
    values = {}
    for reading in ("previous", "client", "current", "literal"):
        client = client_of("pmfl", buffer_size=3, threshold=reading)
        memory = pmfl_memory([angle(0.9), angle(0.2), angle(-0.3)], previous=[0.911684, -0.410885])
        losses, _ = loss_of(client, [1.0, 0.0], angle(0.5), memory)
        values[reading] = losses["contrast"].item()
    assert values["previous"] == pytest.approx(math.log(10.80857 / 10.25975), abs=1e-6)
    assert values["client"] == pytest.approx(values["previous"], rel=1e-12)  # one example: the mean is its own
    assert values["current"] == pytest.approx(math.log(10.80857 / 8.76793), abs=1e-6)
    assert values["literal"] == pytest.approx(math.log(10.80857 / 2.71828), abs=2e-6)


def test_first_round_falls_back_to_the_literal_threshold():
    memory = pmfl_memory([angle(0.9), angle(0.2)], previous=[0.0, 1.0], rounds=0)
    losses, _ = loss_of(client_of("pmfl", buffer_size=2), [1.0, 0.0], [1.0, 0.0], memory)
    assert losses["contrast"].item() == pytest.approx(0.703408, abs=5e-7)


def test_with_an_empty_buffer_or_a_threshold_of_minus_one_is_exactly_zero():
    empty = client_of("pmfl", buffer_size=2)
    losses, _ = loss_of(empty, [1.0, 0.0], angle(0.5), pmfl_memory([angle(0.9), angle(0.2)], pushed=0))
    assert losses["contrast"].item() == 0.0
    everything = client_of("pmfl", buffer_size=2, threshold="constant", threshold_value=-1.0)
    losses, _ = loss_of(everything, [1.0, 0.0], angle(0.5), pmfl_memory([angle(0.9), angle(0.2)]))
    assert losses["contrast"].item() == 0.0


def test_literal_with_one_previous_model_is_moons_loss():
    """P3: equal weights, with only the previous local model in the buffer."""
    pmfl = client_of("pmfl", buffer_size=1, threshold="literal", contrast_weight=0.7)
    moon = client_of("moon", contrast_weight=0.7)
    now, received, previous = [0.3, 1.1], [1.0, 0.4], [-0.2, 0.9]
    ours, w = loss_of(pmfl, now, received, pmfl_memory([previous]))
    theirs, v = loss_of(moon, now, received, {"previous/classifier.w": torch.tensor([previous], dtype=torch.float64)})
    assert ours["loss"].item() == pytest.approx(theirs["loss"].item(), rel=1e-12)
    ours["loss"].backward()
    theirs["loss"].backward()
    torch.testing.assert_close(w.grad, v.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("start", ["received", "previous"])
def test_buffer_holds_the_last_iterates_across_rounds(start):
    """N = 3, two steps a round: after two rounds the buffer holds iterates 1, 2 and 3 of the four start models."""
    # With ``buffer_start=previous`` the second round's first step adds the final model of the first round.
    local = {"iterations": 2, "batch_size": 1, "lr": 0.1}
    threshold = {"received": "previous", "previous": "literal"}[start]  # each needs the previous model in the client state
    strategy = strategy_settings("pmfl", buffer_size=3, buffer_start=start, threshold=threshold, local=local)
    workspace = scalar_workspace(config_of("num_clients=1") | {"strategy": strategy}, Vector([1.0, 2.0]), targets=(3,))
    client = workspace.client_class(workspace, [0])
    iterates, loss = [], client.loss

    def record_iterate(params, batch, loss_inputs):
        iterates.append(params["classifier.w"].detach().clone())
        return loss(params, batch, loss_inputs)

    client.loss = record_iterate
    received = {"model/classifier.w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    for server_round in (1, 2):
        (update,) = client.update([received], server_round)
        client.client_states, end = [update.client_state], received["model/classifier.w"] + update.tensors["delta/classifier.w"]
        if server_round == 1 and start == "previous":
            iterates.append(end)
    if start == "previous":
        del iterates[3]  # W, which the second round began from
    torch.testing.assert_close(update.client_state["previous/classifier.w"], end)
    assert update.client_state["num_pushed"].item() == 4
    held = {tuple(row.tolist()) for row in update.client_state["iterates/classifier.w"]}
    assert held == {tuple(i.tolist()) for i in iterates[1:]}


@pytest.mark.parametrize(
    ("local", "stack_size"),
    [(STEPS, 2), (EPOCHS, 1), slow(STEPS, 1), slow(EPOCHS, 2)],
    ids=["steps2", "epochs1", "steps1", "epochs2"],
)
@pytest.mark.parametrize(
    ("scope", "size", "start", "threshold"),
    [
        ("across", 3, "received", "previous"),
        ("within", 3, "received", "client"),
        ("across", 60, "received", "client"),
        ("across", 3, "previous", "previous"),
    ],
)
def test_compares_with_what_its_buffer_holds(scope, size, start, threshold, local, stack_size):
    """Stored representations equal those that are computed anew from the received model and the iterates at each step.

    Clients participate unequally often, so that a stack has buffers of different fill. The last to fill stays longest. The
    threshold is the cosine of the received and the previous model's representations of each image, or its mean.
    """
    config = config_of("strategy=pmfl", "num_clients=12", "model=mlp", "model.hidden=[8]", f"strategy.buffer_scope={scope}")
    config["strategy"] |= {"buffer_size": size, "buffer_start": start, "threshold": threshold}
    config["strategy"]["local"] |= local
    workspace, steps, pairs = workspace_of(config, dtype=torch.float64), [], []
    past, ended, began = {}, {}, set()  # per client: iterates, newest first, final model, and whether it has one

    class Watched(workspace.client_class):
        def train(self, stack, before_step, **options):
            def record_pairs(now):
                anew, there, mu = self.anew(now)
                found = before_step(now)
                steps.append((now.number, len(now.stack)))
                pairs.append((~found["missing"], there))
                real = there[:, None, :, None] * now.batch.mask[..., None, None]
                pairs.append((found["directions"] * real, anew * real))
                pairs.append((found["mu"] * now.batch.mask, mu * now.batch.mask))
                return found

            losses = super().train(stack, before_step=record_pairs, **options)
            ended.update({client: row_of(stack.params, k) for k, client in enumerate(stack.clients)})
            began.update(stack.clients)
            return losses

        def anew(self, now):
            clients, received = now.stack.clients, now.stack.global_model
            rows = [row_of(received, k) for k in range(len(clients))]
            if now.number == 0 and scope == "within":
                past.update({client: [] for client in clients})
            held = [past.setdefault(client, [])[:size] for client in clients]
            ages = range(max(map(len, held)))
            older = [[mine[age] if age < len(mine) else row for mine, row in zip(held, rows, strict=True)] for age in ages]
            last = [ended.get(client, row) for client, row in zip(clients, rows, strict=True)]
            z, previous, *others = (unit(self.of_all(models, now.batch.x)) for models in (rows, last, *older))
            for k, client in enumerate(clients):
                pushed = last[k] if now.number == 0 and start == "previous" else row_of(now.stack.params, k)
                past[client].insert(0, pushed)
            since, mask = (z * previous).sum(-1), now.batch.mask
            if threshold == "client":
                since = ((since * mask).sum(1) / mask.sum(1)).unsqueeze(1).expand_as(since)
            first = torch.tensor([client not in began for client in clients]).unsqueeze(1)
            there = torch.tensor([[True] + [age < len(mine) for age in ages] for mine in held])
            return torch.stack([z, *others], dim=2), there, since.masked_fill(first, 1)

        def of_all(self, models, x):
            return each_image(self.represent, {n: torch.stack([model[n] for model in models]) for n in models[0]}, x)

    workspace.client_class = Watched
    run_strategy(workspace, config, Schedule([[0, 2], [0, 1], [1, 2], [0, 1, 2]]), 4, stack_size=stack_size)
    sizes = [len(workspace.federation.partition.train(client)) for client in range(3)]
    assert len(set(sizes)) > 1
    assert {step for step, _ in steps} == set(range(max(map(workspace.config.local.steps, sizes))))
    assert {alive for _, alive in steps} >= {1, stack_size}
    for found, anew in pairs:
        torch.testing.assert_close(found, anew, rtol=0, atol=1e-12)


def row_of(model, k):
    """Return a copy of one client's model in a stack's."""
    return {n: v[k].detach().clone() for n, v in model.items()}


def test_asks_each_frozen_model_once_for_all_steps_that_need_it():
    """Five steps and iterates need 10 passes instead of 31: 5 old and 3 new iterates, the received and the previous model."""
    config = config_of("strategy=pmfl", "num_clients=1", "model=mlp", "model.hidden=[8]", "strategy.local.iterations=5")
    workspace = workspace_of(config)
    calls, held = [], []

    class Counted(workspace.client_class):
        def represent(self, params, x):
            calls.append(len(x))
            return super().represent(params, x)

        def train(self, stack, before_step, **options):
            held.append(weakref.ref(stack))
            return super().train(
                stack, before_step=lambda now: held.append(weakref.ref(now.stack)) or before_step(now), **options
            )

    client, received = Counted(workspace, [0]), {f"model/{n}": v for n, v in workspace.initial.items()}
    gc.disable()  # what a round leaves behind in a cycle is 12 models, until some collection
    try:
        for server_round in (1, 2):
            calls.clear()
            (update,) = client.update([received], server_round)
            client.client_states = [update.client_state]
            assert held
            assert all(stack() is None for stack in held)
    finally:
        gc.enable()
    batch = config["strategy"]["local"]["batch_size"]
    assert sorted(calls) == [batch * steps for steps in (1, 1, 2, 2, 3, 3, 4, 5, 5, 5)]


def test_without_its_parts_and_with_lagged_weights_it_is_fedau():
    schedule = [[0, 1, 2], [], [1, 5], [0, 3], [2, 5, 7]]
    pmfl, _ = digits_run("pmfl", 5, schedule=schedule, contrast_weight=0.0, history_size=0, interval_lag=True, cutoff=3)
    fedau, _ = digits_run("fedau", 5, schedule=schedule, cutoff=3)
    close(pmfl[-1], fedau[-1])


def test_with_the_papers_sign_climbs():
    down = run_scalar("pmfl", FULL_COHORTS, **PLAIN_SETTINGS, history_size=0, start=10.0)
    up = run_scalar("pmfl", FULL_COHORTS, **PLAIN_SETTINGS, history_size=0, start=10.0, sign="paper")
    assert abs(down[-1] - 3) < 7 < abs(up[-1] - 3)


def test_step_is_divided_by_all_clients():
    # K = 4, Delta = 1 with x = 4 (first seen in round 4), Delta = -2 with x = 1 (seen every round).
    changes = {**PLAIN_SETTINGS, "history_size": 0}
    # Client 1 starts at its optimum (Delta 0), so only round 4 moves. See the strategy's own test below.
    values = run_scalar("pmfl", [[], [], [], [0]], targets=(12, 2, 2, 2), **changes)
    # x = 4, Delta = 0.19 (12 - 2) = 1.9, K = 4: W = 2 + 4 * 1.9 / 4
    assert values == pytest.approx([2, 2, 2, 3.9], rel=1e-12)
