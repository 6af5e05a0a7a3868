"""A phase of local training: its batches, optimiser, clipping, rates, state between rounds, and deadline."""

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import close, config_of, digits_run, make_local_training, run_scalar, sized_workspace, slow, workspace_of

from contrafed import compose, run
from contrafed.training import client_stack as stack_module
from contrafed.training.base import DeadlineError, LocalError
from contrafed.training.batches import Batches
from contrafed.training.losses import contrast, cosine, cross_entropy
from contrafed.training.optimizers import Optimizer


def test_batches_of_epochs_and_iterations():
    examples = np.arange(100, 110)
    epochs = make_local_training(epochs=2, batch_size=4).batches(examples, np.random.default_rng(0))
    assert [len(b) for b in epochs] == [4, 4, 2, 4, 4, 2]
    assert sorted(np.concatenate(epochs[:3])) == sorted(np.concatenate(epochs[3:])) == list(examples)
    steps = make_local_training(iterations=5, batch_size=4).batches(examples, np.random.default_rng(0))
    assert [len(b) for b in steps] == [4] * 5
    assert len(set(np.concatenate(steps[:2]))) == 8  # within a pass nothing repeats
    small = make_local_training(iterations=3).batches(examples, np.random.default_rng(0))
    assert [len(b) for b in small] == [10] * 3
    share = make_local_training(epochs=1, batch_size=0.25)
    assert [len(b) for b in share.batches(examples, np.random.default_rng(0))] == [3, 3, 3, 1]  # ceil(10 / 4)
    assert (share.steps(10), make_local_training(epochs=5, batch_size=0.1).steps(500)) == (4, 50)
    assert [make_local_training(epochs=1, batch_size=0.07).batch_of(n) for n in (100, 101)] == [7, 8]


def test_exactly_one_of_epochs_and_iterations(expect_error):
    for epochs, iterations in ((1, 5), (None, None)):
        with expect_error("strategy.local.epochs"):
            make_local_training(epochs=epochs, iterations=iterations)


@pytest.mark.parametrize("stack_size", [1, 3])
def test_gradients_are_whole_in_their_parameters_layout_and_gone_after_the_step(monkeypatch, stack_size):
    """Autograd may return one tensor for two parameters, or one that is expanded or in another layout."""
    # Clipping writes in place.
    config = config_of(
        "strategy=fedavg", "num_clients=30", "model=cnn_pmfl", "model.hidden=[8]", "strategy.local.clip_norm=0.01"
    )
    workspace, seen, taken = workspace_of(config, dtype=torch.float64), [], Optimizer.step

    class Shared(workspace.client_class):
        def loss(self, params, batch, loss_inputs):
            stages = [params[f"encoder.stages.{layer}.bias"] for layer in (0, 1)]
            return {"loss": (stages[0] + stages[1]).sum() + super().loss(params, batch, loss_inputs)["loss"]}

    def record_step(self, params, step):
        gradients = [value.grad for value in params.values()]
        norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0).sqrt()
        layouts = [(value.stride(), value.grad.stride()) for value in params.values()]
        seen.append((params, norms, layouts, len({gradient.data_ptr() for gradient in gradients})))
        taken(self, params, step)

    monkeypatch.setattr(Optimizer, "step", record_step)
    client = Shared(workspace, range(stack_size))
    client.update([{f"model/{name}": value for name, value in workspace.initial.items()}] * stack_size, 1)
    assert len(seen) == 5
    for params, norms, layouts, apart in seen:
        torch.testing.assert_close(norms, torch.full_like(norms, 0.01), rtol=1e-3, atol=0)
        # With one client, the stride of the client axis has no meaning.
        assert all(value[1:] == gradient[1:] for value, gradient in layouts)
        assert apart == len(layouts) == len(workspace.initial)
        assert all(value.grad is None for value in params.values())


def test_clipping_bounds_each_clients_gradient():
    """One SGD step of lr 1 moves a client by exactly the clip norm when its gradient is larger."""
    models, _ = digits_run("fedavg", 1, clients=1, local={"iterations": 1, "lr": 1.0, "clip_norm": 0.01})
    moved = torch.cat([(models[1][n] - models[0][n]).flatten() for n in models[0]]).norm().item()
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_learning_rate_decays_per_round():
    """lr at round 501 is 0.1 * 0.998^500 = 0.0367512 (F7)."""
    local_training = make_local_training(epochs=1, batch_size=1, lr_decay=0.998)
    w = torch.zeros(1, 1, requires_grad=True)
    w.grad = torch.ones(1, 1)
    Optimizer(local_training, 501, [1], {"w": w}, {}).step({"w": w}, 0)
    assert -w.item() == pytest.approx(0.0367512, rel=1e-5)


def test_learning_rate_decays_per_local_epoch():
    """w = 2, a = 0, two passes over one example: 2 (1 - 0.1) (1 - 0.05) = 1.71."""
    values = run_scalar("fedavg", [[0]], targets=(0,), local={"epoch_lr_decay": 0.5})
    assert values == pytest.approx([1.71], rel=1e-12)


def test_proximal_weight_by_hand():
    """w goes from 2 to 1.8. The gradient is then 1.8 + 0.5 * (1.8 - 2) = 1.7, so w is 1.63."""
    # mu/2 |w - W|^2 equals FedProx's own key to the last bit.
    values = run_scalar("fedavg", [[0]], targets=(0,), local={"proximal_weight": 0.5})
    assert values == pytest.approx([1.63], rel=1e-12)
    for rounds in ([[0]], [[0, 1], [2], [0, 1, 2]]):
        fedprox = run_scalar("fedprox", rounds, proximal_weight=0.5)
        assert run_scalar("fedavg", rounds, local={"proximal_weight": 0.5}) == pytest.approx(fedprox, rel=1e-14)


def test_the_optimisers_of_one_by_one_clients_and_of_stacks_agree():
    """Optimisers per client (own clocks), without any difference, equal the stacked one."""
    local = {"iterations": None, "epochs": 2, "batch_size": 7, "optimizer": "adam", "lr": 0.01}
    few = {"clients": 40, "schedule": [range(4)] * 2}
    plain, _ = digits_run("fedavg", 2, stack_size=4, local=local, **few)
    nearly = digits_run("fedavg", 2, stack_size=4, local=local | {"epoch_lr_decay": 1 - 1e-16}, **few)[0]
    close(plain[-1], nearly[-1])
    decayed, _ = digits_run("fedavg", 2, stack_size=4, local=local | {"epoch_lr_decay": 0.5}, **few)
    with pytest.raises(AssertionError):
        close(plain[-1], decayed[-1])


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_kept_optimisers_go_on_where_they_were(optimizer):
    """One client, two rounds of two steps: with its optimiser kept it is one run of four steps."""
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


def passes(epochs):
    return {"epochs": epochs, "iterations": None, "batch_size": 4}


def test_each_phase_is_sorted_by_its_own_steps_and_put_back():
    """Clients of 20 and 11 examples: 10 and 11 steps by six hundredths, 5 and 3 by fours. The losses identify the client."""
    workspace, seen = sized_workspace("fedavg", [20, 11], local=passes(1)), []

    class Phases(workspace.client_class):
        loss_names = ("mine",)

        def local_update(self, stack):
            mine = torch.tensor([[float(client)] for client in stack.clients])
            local_training, model = replace(self.config.local, batch_size=0.06), {"mine": mine}
            phases = [
                self.train(stack, local_training=local_training, loss_inputs=model, loss=self.compute_mine, purpose="first"),
                self.train(
                    stack,
                    local_training=local_training,
                    reference_models={"mine": (self.name, model)},
                    loss=self.compute_mine,
                    purpose="second",
                ),
                self.train(stack, before_step=self.check_batch, loss=self.compute_mine),
            ]
            for losses in phases:
                seen.append((losses.steps, losses.mean("mine").tolist(), losses.counts.sum(1).tolist()))
            return self.make_upload(stack)

        def name(self, model, x):
            return model["mine"].expand(len(x), 1)

        def check_batch(self, now):
            assert len(now.batch.y) == len(now.stack)
            return {"mine": torch.tensor([[float(client)] for client in now.stack.clients])}

        def compute_mine(self, params, batch, loss_inputs):
            return self.loss(params, batch, {}) | {"mine": loss_inputs["mine"].mean()}

    client = Phases(workspace, [0, 1])
    received = {f"model/{name}": value for name, value in workspace.initial.items()}
    updates = client.update([received] * 2, 1)
    assert seen == [([10, 11], [0, 1], [20, 11])] * 2 + [([5, 3], [0, 1], [20, 11])]
    assert [update.num_examples for update in updates] == [20, 11]


@pytest.mark.parametrize("clients", [[0], [0, 1, 2]])
def test_losses_of_a_phase_that_learns_nothing_are_zero(clients):
    """A body without parameters has losses of zero, not the placeholders of its batches' sizes."""
    config = config_of("strategy=fedrep", "num_clients=3", "model=mlp", "model.hidden=[]")
    workspace, seen = workspace_of(config), []

    class Bodiless(workspace.client_class):
        def train(self, stack, **how):
            seen.append(super().train(stack, **how))
            return seen[-1]

    received = {f"model/{n}": v for n, v in workspace.initial.items() if not n.startswith("classifier")}
    assert received == {}
    Bodiless(workspace, clients).update([received] * len(clients), 1)
    head, body = ([losses.mean("loss"), losses.last("loss")] for losses in seen)
    assert all(bool((each > 0).all()) for each in head)
    assert [each.tolist() for each in body] == [[0.0] * len(clients)] * 2


def test_a_deadline_is_looked_at_before_every_step(monkeypatch):
    workspace = sized_workspace("fedavg", [20, 11], local=passes(2))
    clock, steps = itertools.count(), []
    monkeypatch.setattr(stack_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    class Watched(workspace.client_class):
        def local_update(self, stack):
            self.train(stack, before_step=lambda now: steps.append(now.number) or {})
            return self.make_upload(stack)

    received = {f"model/{name}": value for name, value in workspace.initial.items()}
    with pytest.raises(DeadlineError):
        Watched(workspace, [0, 1]).update([received] * 2, 1, deadline=2.5)
    assert steps == [0, 1, 2]
    Watched(workspace, [0, 1]).update([received] * 2, 1, deadline=1e9)
    assert steps == [0, 1, 2, *range(10)]


def test_what_goes_wrong_is_said_with_client_round_and_step():
    workspace = sized_workspace("fedavg", [20, 11], local=passes(2))

    class Broken(workspace.client_class):
        def local_update(self, stack):
            self.train(stack, before_step=lambda now: {} if now.number < 3 else 1 / 0)
            return self.make_upload(stack)

    received = {f"model/{name}": value for name, value in workspace.initial.items()}
    place = rf"\(tests/test_training\.py, line {Broken.local_update.__code__.co_firstlineno + 1}\)"
    with pytest.raises(LocalError, match=rf"^client 1, 0, round 7, step 3: ZeroDivisionError: division by zero {place}$"):
        Broken(workspace, [1, 0]).update([received] * 2, 7)


SMALL_RUN = (
    "num_clients=4", "model=mlp", "model.hidden=[8]", "participation=full", "num_rounds=2", "engine=local", "tracker=none",
)  # fmt: skip
NO_STEP = {
    "fedbabu": "strategy.tune_epochs=0", "fedavg_ft": "strategy.tune_epochs=0", "fedrep": "strategy.head_epochs=0",
    "mpfedcon": "strategy.head_epochs=0", "fedpac": "strategy.head_epochs=0",
}  # fmt: skip


@pytest.mark.parametrize("method", [name if name in ("fedbabu", "mpfedcon") else slow(name) for name in NO_STEP])
def test_a_phase_without_a_step_may_have_augmentation(tmp_path, method):
    how = (f"strategy={method}", NO_STEP[method], "strategy.local.augment=[crop,flip]", "dataset.merge_splits=true", *SMALL_RUN)
    summary = run(compose(*how, f"output_dir={tmp_path}"))
    assert (summary["failures"], summary["replies_rejected"]) == (0, 0)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [row for row in rows if row.startswith("2,personal,test,accuracy,")]


def test_a_pass_over_no_example_sums_to_zero_alone_as_in_a_stack():
    workspace = workspace_of(config_of("strategy=fedproto", "num_clients=4", "model=mlp"), dtype=torch.float64)
    none, some = np.zeros(0, np.int64), workspace.federation.partition.train(0)
    assert Batches.one_pass(workspace, [none], padded=True).at(0, 1).mask.tolist() == [[0]]
    passes = [Batches.one_pass(workspace, rows, padded=True) for rows in ([none, none], [none, some])]
    assert [one.counts.sum().item() for one in passes] == [0, len(some)]


@pytest.mark.parametrize("method", [slow("fedcrl"), slow("fedproto"), "mpfedcon", slow("fedppo")])
def test_a_client_that_only_tests_is_evaluated_after_its_local_work_alone_as_in_a_stack(tmp_path, method):
    lists = np.arange(400).reshape(4, 100)
    train, test = [part[:80].tolist() for part in lists], [part[80:].tolist() for part in lists]
    file = tmp_path / "clients.json"
    file.write_text(json.dumps({"train": [train[0], [], *train[2:]], "test": test}))
    how = (
        "evaluate_after=local_training", "partition=file", f"partition.path={file}", "partition.min_client_size=0",
        "eval_clients=true",
    )  # fmt: skip
    rows = []
    for size in (1, 4):
        folder = tmp_path / str(size)
        sizes = (f"engine.stack_size={size}", f"output_dir={folder}")
        summary = run(compose(f"strategy={method}", *how, "dataset.merge_splits=true", *SMALL_RUN, *sizes))
        assert summary["failures"] == 0
        rows.append([row.split(",")[1] for row in (folder / "clients.csv").read_text().splitlines() if ",accuracy," in row])
    assert rows[0] == rows[1]
    assert "1" in rows[0]


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
