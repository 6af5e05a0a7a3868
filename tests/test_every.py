"""Requirements on every method of conf/strategy. A new method is tested as soon as it has a YAML."""

import dataclasses
import math
import re
import typing
from functools import cache
from pathlib import Path

import pytest
from accelerator import NAME, accelerator, crossings
from helpers import SEVERAL, close, same, slow, workspace_of
from recording import ROUNDS, STACK_SIZE, numbers, sent_tensors, settings_of, shapes, watch

from contrafed.config.run_config import resolve, server_of
from contrafed.core import registry
from contrafed.core.errors import UserError
from contrafed.core.schema import convert
from contrafed.core.tensors import on_host
from contrafed.runs import checkpoint
from contrafed.runs.run import run
from contrafed.server.base import FederatedStrategy, strategy_class_of
from contrafed.training.loop import part_of
from contrafed.training.workspace import EVALUATION_BATCH

METHODS = list(registry.choices("strategy"))


def slow_but_for(names):
    """Return the mark of a test that runs for all methods, by default for these."""
    chosen = [name if name in names else slow(name) for name in METHODS]
    return pytest.mark.parametrize("method", chosen, indirect=True)


SLOW_FOR_OTHERS = slow_but_for(SEVERAL)
SLOW_FOR_MOST = slow_but_for(("pmfl", "scaffold"))


@pytest.fixture(scope="module", params=METHODS)
def method(request):
    return request.param


@pytest.fixture(scope="module")
def config(method, problem):
    return settings_of(method, problem)


@pytest.fixture(scope="module")
def alone(config):
    """Return the method's run with every client alone, which most of the tests below use."""
    return watch(config)


def compare(a, b, equal):
    """Compare the global models and the client states of two runs after every round."""
    for one, other in zip(a.models, b.models, strict=True):
        equal(one, other)
    for one, other in zip(a.client_states, b.client_states, strict=True):
        assert one.keys() == other.keys()
        for client in one:
            equal(one[client], other[client])


def identical(a, b):
    assert same(a, b)


def test_a_stack_equals_its_clients_alone(config, alone):
    """Clients of all sizes: they take different numbers of steps, and last batches are short."""
    stacked = watch(config, stack_size=STACK_SIZE)
    compare(stacked, alone, close)
    for one, other in zip(stacked.rounds, alone.rounds, strict=True):
        assert numbers(one) == pytest.approx(numbers(other), rel=1e-9, abs=1e-9)


@slow_but_for(("pmfl", "fedproto", "scaffold"))
@pytest.mark.parametrize(
    "local", [{"epochs": None, "iterations": 3, "batch_size": 0.3}, {"epochs": 1, "batch_size": 1}], ids=["widths", "ones"]
)
def test_a_stack_equals_its_clients_alone_in_other_batches(config, local):
    """Batches of different widths in one step, and batches of one."""
    work = config["strategy"]["local"] | local
    config = config | {"strategy": config["strategy"] | {"local": work}}
    runs = [watch(config, [(1, 2, 3), (1, 2, 4)], stack_size=size, evaluate=False) for size in (1, 3)]
    compare(*runs, close)
    for done in runs[0].rounds:
        assert all(math.isfinite(value) for value in numbers(done).values())


def test_a_client_that_returns_has_the_memory_it_left_with(alone):
    client_class = alone.workspace.client_class
    remembers = client_class.has_client_state(alone.workspace.model, alone.workspace.config)
    for t, client, memory in alone.arrived:
        assert same(memory, alone.client_states[t - 1].get(client, {}))
        assert bool(alone.client_states[t].get(client)) == remembers
    for t in range(1, len(ROUNDS) + 1):
        here = set(alone.rounds[t].participants.tolist())
        away = alone.client_states[t].keys() - here
        assert away == alone.client_states[t - 1].keys() - here
        for client in away:
            identical(alone.client_states[t][client], alone.client_states[t - 1][client])
    names = {frozenset(memory) for client_states in alone.client_states for memory in client_states.values()}
    assert len(names) <= 1


def test_only_what_is_declared_crosses(alone):
    workspace = alone.workspace
    down, up = workspace.client_class.message_spec(workspace.model, workspace.config)
    parts = workspace.client_class.shared_parts(workspace.config)
    personal = [name for name in workspace.initial if part_of(name) not in parts]
    assert not {f"{group}/{name}" for group in ("model", "delta") for name in personal} & {*down, *up}
    for message, reply in alone.trained:
        assert (set(message.content), set(reply.content)) == ({"arrays", "config"}, {"arrays", "metrics"})
        assert set(message.content["config"]) == {"server-round", "settings", "cost"}
        assert (shapes(message.content["arrays"]), shapes(reply.content["arrays"])) == (down, up)
        assert all(isinstance(value, int | float) for value in reply.content["metrics"].values())
    for message, reply in alone.scored:
        assert (set(message.content), set(reply.content)) == ({"arrays", "config"}, {"metrics"})
        assert shapes(message.content["arrays"]) == down
    # Under no other name either, unless the method declares it by the tensor's own, as FedPAC its head.
    crossed = {}
    for name, tensor in (pair for both in alone.trained for pair in sent_tensors(both)):
        crossed.setdefault(tensor.numpy().tobytes(), set()).add(name)
    for memory in (memory for client_states in alone.client_states for memory in client_states.values()):
        for name in (f"personal/{name}" for name in personal if memory and memory[f"personal/{name}"].any()):
            names = crossed.get(memory[name].numpy().tobytes(), set())
            assert all(other.endswith(name.removeprefix("personal")) for other in names)


@SLOW_FOR_OTHERS
def test_evaluation_changes_nothing_and_the_same_seed_gives_the_same_bits(config, alone):
    again = watch(config, evaluate=False)
    compare(again, alone, identical)
    assert [done.metrics for done in again.rounds] == [done.metrics for done in alone.rounds]


@SLOW_FOR_MOST
def test_an_accelerator_gives_the_same_bits(method, problem, monkeypatch):
    """On the simulated one, which refuses a tensor that was not moved."""
    monkeypatch.setattr("contrafed.training.workspace.EVALUATION_BATCH_ELSEWHERE", EVALUATION_BATCH)
    config, rounds = settings_of(method, problem, epochs=1), [(1, 3), (1, 2, 4)]
    here = watch(config, rounds, stack_size=STACK_SIZE)
    with accelerator():
        there = watch(config, rounds, stack_size=STACK_SIZE, device=NAME)
        there.models = [on_host(model) for model in there.models]
    compare(there, here, identical)
    assert [numbers(done) for done in there.rounds] == [numbers(done) for done in here.rounds]


@SLOW_FOR_MOST
def test_no_step_waits_for_the_accelerator(method, problem):
    """Rounds of two epochs have as many transfers as rounds of one."""
    counts = []
    for epochs in (1, 2):
        crossings.clear()
        with accelerator():
            watch(settings_of(method, problem, epochs=epochs), [(1, 3)] * 2, stack_size=2, evaluate=False, device=NAME)
        counts.append(len(crossings))
    assert counts[0] == counts[1] > 0


@SLOW_FOR_OTHERS
def test_a_faulty_client_is_absent_and_keeps_the_memory_it_had(config, alone):
    """In round 2 a client in a stack raises after its training, in its second participation. In round 4 one uploads a NaN."""
    before, here = (set(alone.rounds[t].participants.tolist()) for t in (1, 2))
    broken_one, bad = min(before & here or here), []

    def trouble(server_round, clients, sent):
        if server_round == 2 and broken_one in clients:
            raise RuntimeError("broken sensor")
        if server_round == 4 and sent and bad in ([], clients[:1]):
            bad[:] = clients[:1]
            name = next(iter(sent))
            sent[name] = sent[name].clone()
            sent[name][0] = math.nan

    broken = watch(config, stack_size=STACK_SIZE, trouble=trouble)
    assert [dict(done.rejected) for done in broken.rounds] == [{}, {}, {"failed": 1}, {}, {"not finite": 1} if bad else {}]
    said = rf"client {broken_one}, round 2, step \d+: RuntimeError: broken sensor"
    assert re.match(said, broken.rounds[2].failures[0])
    identical(broken.client_states[2].get(broken_one, {}), broken.client_states[1].get(broken_one, {}))
    for client in here - {broken_one}:
        close(broken.client_states[2].get(client, {}), alone.client_states[2].get(client, {}))
    assert all(value.isfinite().all() for value in broken.models[-1].values())
    without = [ROUNDS[0], sorted(set(ROUNDS[1]) - {broken_one}), (), ()]  # a strategy may use the planned number of rounds
    absent = watch(config, without, stack_size=STACK_SIZE, evaluate=False)
    if set(absent.rounds[2].participants.tolist()) == here - {broken_one}:  # a strategy that selects may replace it
        close(broken.models[2], absent.models[2])


def wrong_for(hint):
    """Return a value that a setting of this type does not accept."""
    for value in ("nonsense", [], -1e9):
        try:
            convert(hint, value, "key")
        except UserError:
            return value
    raise AssertionError(f"{hint} takes anything")


def test_a_wrong_value_of_a_methods_own_key_is_one_line(config):
    wanted = resolve(config)
    for module in (wanted.client.strategy.module, wanted.server.module):
        hints = typing.get_type_hints(module.Config, include_extras=True)
        for key in (field.name for field in dataclasses.fields(module.Config) if field.name != "local"):
            mistaken = config["strategy"] | {key: wrong_for(hints[key])}
            with pytest.raises(UserError, match=rf"^strategy\.{key}: [^\n]*$"):
                resolve(config | {"strategy": mistaken})
            with pytest.raises(UserError, match=rf"^[^\n]*'{key}z'[^\n]*{key}[^\n]*$"):
                resolve(config | {"strategy": config["strategy"] | {f"{key}z": 1}})


FILES = ("model.safetensors", "metrics.csv", "clients.csv", "participants.csv")


def outcome(folder):
    """Return a run's files by name, and the client states if there is a last checkpoint."""
    last = checkpoint.find(folder)
    client_states = {} if last is None else dict(last.client_states())
    return {name: (Path(folder) / name).read_bytes() for name in FILES}, client_states


def same_outcome(a, b):
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    for client in a[1]:
        identical(a[1][client], b[1][client])


@slow_but_for(("pmfl", "fedcrl", "scaffold", "fedala", "fedmlb"))
def test_a_run_goes_on_from_its_middle_bit_for_bit(config, tmp_path):
    config = config | {"checkpoint_every": 2}
    run(config | {"output_dir": f"{tmp_path}/whole"})
    middle = f"{tmp_path}/whole/checkpoints/000002"
    run(config | {"resume": middle, "output_dir": f"{tmp_path}/later"})
    same_outcome(outcome(f"{tmp_path}/later"), outcome(f"{tmp_path}/whole"))


@slow_but_for(("fedproc", "fedrcl"))
def test_a_run_goes_on_to_more_rounds_bit_for_bit_or_its_method_depends_on_them(config, method, tmp_path):
    config = config | {"checkpoint_every": 1}
    run(config | {"num_rounds": 2, "output_dir": f"{tmp_path}/short"})
    more = config | {"num_rounds": 3, "resume": f"{tmp_path}/short", "output_dir": f"{tmp_path}/later"}
    if method in ("fedproc", "pmfl"):
        with pytest.raises(UserError, match="^resume: num_rounds=3"):
            run(more)
        return
    run(more)
    run(config | {"num_rounds": 3, "output_dir": f"{tmp_path}/whole"})
    same_outcome(outcome(f"{tmp_path}/later"), outcome(f"{tmp_path}/whole"))


@cache
def shape_of(method, problem):
    """Return the structure of a method's messages."""
    # It has the groups of tensors, the parts of a model in them, and whether clients receive different ones.
    settings = settings_of(method, problem)
    workspace = workspace_of(settings)
    declared = workspace.client_class.message_spec(workspace.model, workspace.config)
    alone = (
        strategy_class_of(server_of(settings["strategy"])).per_client_broadcast is not FederatedStrategy.per_client_broadcast
    )
    return *(frozenset(name.partition(".")[0] for name in names) for names in declared), alone  # model/encoder, proto/mean


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_every_engine_gives_the_same_bytes(method, config, problem, tmp_path, engine):
    """One method for each shape of message."""
    like = next(name for name in METHODS if shape_of(name, problem) == shape_of(method, problem))
    if like != method:
        pytest.skip(f"its messages are shaped as those of {like}")
    workers = {"workers": 2} if engine == "ray" else {}
    for name in ("local", engine):
        chosen = settings_of(method, (*problem, f"engine={name}"))["engine"] | (workers if name == engine else {})
        kept = {"checkpoint_every": 2} if engine == "ray" else {}
        run(config | kept | {"engine": chosen, "output_dir": f"{tmp_path}/{name}"})
    same_outcome(outcome(f"{tmp_path}/{engine}"), outcome(f"{tmp_path}/local"))
