"""A stack of clients computes the same as each of its clients alone."""

from dataclasses import replace

import pytest
import torch
from helpers import (
    Schedule,
    build_received,
    close,
    config_of,
    digits_run,
    run_strategy,
    sized_workspace,
    slow,
    stacked_and_alone,
    workspace_of,
)

from contrafed.training.base import Batch, Client, LocalError


@pytest.mark.parametrize(
    "changes", [{"optimizer": "adam", "lr": 0.01}, {"momentum": 0.9, "weight_decay": 0.01}, {"clip_norm": 0.5}]
)
def test_stacked_equals_one_by_one_with_every_optimiser(changes):
    local = {"iterations": None, "epochs": 1, "batch_size": 7, **changes}
    few = {"clients": 40, "schedule": [range(8)] * 2}
    alone, _ = digits_run("pmfl", 2, local=local, **few)
    stacked, _ = digits_run("pmfl", 2, local=local, stack_size=8, **few)
    close(stacked[-1], alone[-1])


@pytest.mark.parametrize("name", ["fedrep", slow("fedavg"), slow("fedcrl")])
def test_kept_optimisers_stack(name):
    """Clients in their first round share a stack with others that have state, and their numbers of steps differ."""
    local = {"iterations": None, "epochs": 1, "batch_size": 7, "optimizer": "adam", "lr": 0.01, "keep_optimizer": True}
    schedule = [[0, 1, 2], [1, 3, 4, 5], [0, 1, 6, 5]]
    alone, _ = digits_run(name, 3, clients=40, schedule=schedule, local=local)
    stacked, _ = digits_run(name, 3, clients=40, schedule=schedule, local=local, stack_size=4)
    close(stacked[-1], alone[-1])


def test_stacked_dropout_sees_the_masks_that_each_client_alone_sees():
    config = config_of("strategy=fedavg", "num_clients=40", "model=cnn_pmfl", "model.hidden=[12,9]", "model.dropout=0.3")
    config["strategy"]["local"] |= {"iterations": None, "epochs": 1, "batch_size": 9}

    def train_model(stack_size):
        workspace = workspace_of(config, dtype=torch.float64)
        return run_strategy(workspace, config, Schedule([range(4)] * 2), 2, stack_size=stack_size)[0][-1]

    alone = train_model(1)
    close(train_model(4), alone)
    config["model"]["dropout"] = 0.0
    with pytest.raises(AssertionError):
        close(train_model(1), alone)


@pytest.mark.parametrize("keep", [False, True], ids=["anew", "kept"])
@pytest.mark.parametrize("turned", [False, True], ids=["unlike-first", "unlike-last"])
def test_a_phase_whose_steps_are_in_another_order_than_the_stacks(turned, keep):
    """Clients of 20 and 11 examples: by six hundredths 10 and 11 steps, by fours 5 and 3, and 15 and 14 in all."""
    local = {"iterations": None, "epochs": 1, "batch_size": 4, "momentum": 0.9, "keep_optimizer": keep}
    workspace = sized_workspace("fedavg", [20, 11], local=local)
    by_share = replace(workspace.config.local, batch_size=0.06)
    assert [[local_training.steps(n) for n in (20, 11)] for local_training in (by_share, workspace.config.local)] == [
        [10, 11],
        [5, 3],
    ]

    class Phases(workspace.client_class):
        def local_update(self, stack):
            phases = [(by_share, "by share"), (self.config.local, "batches")]
            for local_training, purpose in reversed(phases) if turned else phases:
                self.train(stack, local_training=local_training, purpose=purpose)
            return self.make_upload(stack)

        def num_local_steps(self, examples):
            return by_share.steps(examples) + super().num_local_steps(examples)

    stacked_and_alone(workspace, kind=Phases)


def test_memory_written_in_such_a_phase_stays_with_its_client():
    workspace = sized_workspace("fedavg", [20, 11], local={"iterations": None, "epochs": 1, "batch_size": 4})
    by_share = replace(workspace.config.local, batch_size=0.06)

    class Counts(workspace.client_class):
        def init_client_state(self, received):
            return {"seen": torch.zeros((), dtype=torch.float64), "last": torch.zeros((), dtype=torch.float64)}

        def local_update(self, stack):
            self.train(stack)  # by 5 and 3 steps: the stack's order
            self.train(stack, local_training=by_share, purpose="by share", before_step=self._count)  # by 10 and 11
            return self.make_upload(stack)

        def _count(self, now):
            now.stack.state["seen"] += now.batch.mask.sum(1) * (1 + now.number)
            now.stack.state["last"].copy_(now.stack.state["seen"] * len(now.stack.clients) / len(now.stack))
            return {}

    stacked_and_alone(workspace, kind=Counts)


CLIENTS = pytest.mark.parametrize("clients", [[1], [0, 1, 2]], ids=["alone", "stack"])


@CLIENTS
def test_two_phases_with_kept_optimisers_of_one_purpose_are_refused(clients):
    """Otherwise they share one momentum, without a message."""
    workspace = sized_workspace("fedavg", [8, 5, 7], local={"iterations": 2, "epochs": None, "keep_optimizer": True})

    class Phases(workspace.client_class):
        def local_update(self, stack):
            for purpose in self.purposes:
                self.train(stack, purpose=purpose)
            return self.make_upload(stack)

        def eval_models(self, stack):
            self.train(stack, purpose="first")
            return {"model": stack.params}

    client, received = Phases(workspace, clients), [build_received(workspace)] * len(clients)
    client.purposes = ["first", "second"]
    client.update(received, 1)
    client.evaluate_clients(received, 1, after_training=True)  # an evaluation's phases are not the local update's
    client.purposes = ["first", "second", "first"]
    with pytest.raises(LocalError) as found:
        client.update(received, 2)
    assert isinstance(found.value.__cause__, TypeError)


@CLIENTS
def test_a_fixed_encoder_is_known_in_its_views_and_in_gradients(clients):
    """Its outputs are computed once. Another encoder is refused (``test_method_faults.py``)."""
    workspace = sized_workspace("fedavg", [8, 5, 7], local={"iterations": None, "epochs": 2, "batch_size": 4})

    class Looking(workspace.client_class):
        def local_update(self, stack):
            self.train(stack, parts=("classifier",), before_step=self._look)
            return self.make_upload(stack)

        def _look(self, now):
            assert now.batch.x.dim() == 3  # (B, b, E)
            last = {name: value[-1].detach() for name, value in now.stack.params.items()}
            self.forward(last, Batch(*(value[-1] for value in now.batch[:3]), {}))
            self.gradients(self.loss, now.stack.params, now.batch, {})
            return {}

    Looking(workspace, clients).update([build_received(workspace)] * len(clients), 1)


@pytest.mark.parametrize("epochs", [1, 2], ids=["in-order", "reordered"])
def test_state_assigned_in_a_step_is_kept_as_state_that_is_edited(epochs):
    """Clients leave the phase after different steps. In the second case they are in another order than in the stack."""
    workspace = sized_workspace("fedavg", [20, 11], local={"iterations": None, "epochs": 1, "batch_size": 4})
    first = replace(workspace.config.local, epochs=epochs, batch_size=4 if epochs == 1 else 0.06)

    class Counts(workspace.client_class):
        def init_client_state(self, received):
            return {name: torch.zeros(2, dtype=torch.float64) for name in ("assigned", "edited", "both")}

        def local_update(self, stack):
            self.train(stack, local_training=first, before_step=self._count)
            return self.make_upload(stack)

        def _count(self, now):
            state, seen = now.stack.state, now.batch.mask.sum(1, keepdim=True) * (1 + now.number)
            state["assigned"] = state["assigned"] + seen
            state["edited"].add_(seen)
            state["both"] = state["both"] + seen / 2
            state["both"].add_(seen / 2)
            return {}

    for update in stacked_and_alone(workspace, kind=Counts):
        state = update.client_state
        assert float(state["edited"][0]) > 0
        assert torch.equal(state["assigned"], state["edited"])
        assert torch.equal(state["both"], state["edited"])


class Rounds(Client):
    """Its loss, state and models know the round, and its state the client."""

    loss_names = ("round",)

    def init_client_state(self, received):
        return {"begun": torch.tensor([self.server_round, *self.clients], dtype=torch.float64)}

    def loss(self, params, batch, loss_inputs):
        return super().loss(params, batch, loss_inputs) | {"round": torch.tensor(float(self.server_round))}

    def eval_models(self, stack):
        stack.received["round"] = torch.full((len(stack),), float(self.server_round))
        return {"model": stack.params}

    def scores(self, features, received):
        assert self.server_round == self.wanted
        return features.logits


@CLIENTS
def test_a_client_knows_its_round_and_its_number(clients):
    workspace = sized_workspace("fedavg", [8, 5, 7], local={"iterations": 2, "epochs": None})
    client, received = Rounds(workspace, clients), [build_received(workspace)] * len(clients)
    for update, number in zip(client.update(received, 4), clients, strict=True):
        assert update.metrics["round"] == 4
        assert update.client_state["begun"].tolist() == [4, number]
    assert client.clients == clients
    for after_training in (False, True):
        client.wanted = 6 + after_training  # the training would be that of the next round
        evaluated = client.evaluate_clients(received, 6, after_training=after_training)
        assert [float(one.added["round"]) for one in evaluated] == [client.wanted] * len(clients)
    assert client.server_round == 4  # an evaluation changes nothing


WIDTHS = pytest.mark.parametrize("widths", [(16, 3), *map(slow, ((3, 16), (1, 8), (1, 1)))], ids=str)


@WIDTHS
@pytest.mark.parametrize("name", ["fedrep", "mpfedcon"])
def test_phases_whose_batches_are_of_different_width(name, widths):
    """An encoder or a frozen model computes each image once, in batches of one width and then of another."""
    first, second = widths
    local = {"iterations": None, "epochs": 2, "batch_size": second}
    workspace = sized_workspace(name, [20, 11, 1], head_epochs=2, local=local)

    class Phases(workspace.client_class):
        @property
        def _head_training(self):
            return replace(super()._head_training, batch_size=first)

    stacked_and_alone(workspace, kind=Phases)


@WIDTHS
@pytest.mark.parametrize("name", ["moon", "pmfl"])
def test_local_work_done_again_in_batches_of_another_width(name, widths):
    """Previous models and a buffer of iterates outlast a phase, and are applied to other batches."""
    first, second = ({"iterations": None, "epochs": 2, "batch_size": width} for width in widths)
    workspace = sized_workspace(name, [20, 11, 1], local=first)

    class Again(workspace.client_class):
        def local_update(self, stack):
            super().local_update(stack)
            self.config = replace(self.config, local=replace(self.config.local, **second))
            try:
                return super().local_update(stack)
            finally:
                self.config = self.workspace.config

    stacked_and_alone(workspace, kind=Again)
