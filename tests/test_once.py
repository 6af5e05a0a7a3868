"""Inside a run the configuration is resolved once, and the model and the strategy are built once."""

import sys
from collections import Counter

import pytest
from helpers import config_of
from tiny import TINY_RUN

from contrafed.config import method, run_config
from contrafed.core.split_model import SplitModel
from contrafed.engines.grid import LocalGrid
from contrafed.runs.run import run, run_resolved
from contrafed.runs.server_app import serve
from contrafed.runs.setup import compose_deployed_run
from contrafed.server.base import FederatedStrategy
from contrafed.training.workspace import uninstall

SMALL_RUN = (*TINY_RUN, "participation=full", "num_rounds=1", "engine=local")


@pytest.fixture
def counts(monkeypatch):
    """Return how often this process resolved the configuration and built models and strategies."""
    found = Counter()

    def count(name, function):
        def count_call(*args, **kwargs):
            found[name] += 1
            return function(*args, **kwargs)

        return count_call

    for cls in (SplitModel, FederatedStrategy):
        monkeypatch.setattr(cls, "__init__", count(cls.__name__, cls.__init__))
    resolve = run_config.resolve
    counted = count("resolve", resolve)
    for module in [module for name, module in sys.modules.items() if name.startswith("contrafed")]:
        for name in [name for name, value in vars(module).items() if value is resolve]:
            monkeypatch.setattr(module, name, counted)
    return found


CALLS_OF_A_RUN = {"resolve": 1, "SplitModel": 1, "FederatedStrategy": 1}


@pytest.mark.parametrize("name", ["fedavg", "pmfl", "fedcrl"])
def test_a_run_resolves_and_builds_once(counts, name, tmp_path):
    run(config_of(*SMALL_RUN, f"strategy={name}", f"output_dir={tmp_path}/run"))
    assert counts == CALLS_OF_A_RUN


def test_so_does_the_command(counts, call_command, tmp_path):
    done = call_command("strategy=moon", *SMALL_RUN, f"output_dir={tmp_path}/run")
    assert (done.returncode, done.stderr) == (0, "")
    assert counts == CALLS_OF_A_RUN


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_so_do_engines_whose_clients_are_other_processes(counts, engine, tmp_path):
    run(config_of(*SMALL_RUN[:-1], f"engine={engine}", "strategy=fedavg", f"output_dir={tmp_path}/run"))
    assert counts == CALLS_OF_A_RUN


def test_so_does_a_run_that_goes_on(counts, tmp_path):
    run(config_of(*SMALL_RUN, "strategy=pmfl", "checkpoint_every=1", "num_rounds=2", f"output_dir={tmp_path}/run"))
    counts.clear()
    middle = f"resume={tmp_path}/run/checkpoints/000001"
    run(config_of(*SMALL_RUN, "strategy=pmfl", "checkpoint_every=1", "num_rounds=2", middle, f"output_dir={tmp_path}/later"))
    assert counts == CALLS_OF_A_RUN


def test_so_does_an_evaluation_of_a_finished_run(counts, tmp_path):
    run(config_of(*SMALL_RUN, "strategy=fedcrl", "save_personal=true", f"output_dir={tmp_path}/run"))
    counts.clear()
    run(config_of("engine=local", f"evaluate_only={tmp_path}/run", f"output_dir={tmp_path}/again"))
    assert counts == CALLS_OF_A_RUN


def test_so_does_a_server_of_devices(counts, tmp_path):
    """Flower starts it: first ``compose_deployed_run``, then ``serve`` on the existing Grid."""
    overrides = " ".join((*SMALL_RUN, "strategy=moon", f"output_dir={tmp_path}/run"))
    wanted = compose_deployed_run(overrides)
    try:
        serve(LocalGrid(wanted.num_clients, 1), wanted)
    finally:
        uninstall()
    assert counts == CALLS_OF_A_RUN


def test_a_resolved_run_can_be_run_twice_and_its_strategy_begins_anew(counts, tmp_path):
    resolved = run_config.resolve(config_of(*SMALL_RUN, "strategy=pmfl", f"output_dir={tmp_path}/run"))
    first, second = (run_resolved(resolved) for _ in range(2))
    assert counts == {"resolve": 1, "SplitModel": 2, "FederatedStrategy": 2}
    assert first["folder"] != second["folder"]
    for file in ("model.safetensors", "metrics.csv"):
        left, right = ((tmp_path / name / file).read_bytes() for name in ("run", "run-2"))
        assert left == right


def test_a_sweep_tries_each_method_without_data_before_its_first_job(counts, monkeypatch, expect_error):
    monkeypatch.setattr("contrafed.data.federation.load_images", None)
    method.try_method(run_config.resolve(config_of(*SMALL_RUN, "strategy=scaffold")))
    assert counts == CALLS_OF_A_RUN
    with expect_error("privacy"):
        method.try_method(run_config.resolve(config_of("strategy=scaffold", "privacy=laplace")))


@pytest.mark.parametrize(
    ("place", "function", "key"),
    [
        ("contrafed.strategies.fedavg.FedAvg.setup", lambda self: 1 / 0, "strategy.server"),
        ("contrafed.strategies.fedavg.FedAvg.broadcast", lambda self, model: None, "FedAvg"),
        ("contrafed.strategies.fedavg.FedAvg.eval_model", lambda self, model: None, "FedAvg.eval_model"),
        ("contrafed.clients.fedavg.FedAvgClient.message_spec", classmethod(lambda cls, model, config: {}), "strategy"),
    ],
)
def test_a_fault_of_what_a_run_builds_is_one_line_and_leaves_no_folder(
    monkeypatch, tmp_path, expect_error, place, function, key
):
    monkeypatch.setattr(place, function, raising=False)
    with expect_error(key):
        run(config_of(*SMALL_RUN, "strategy=fedavg", f"output_dir={tmp_path}/run"))
    assert not (tmp_path / "run").exists()


def test_what_a_broadcast_keeps_beside_the_state_is_refused_before_the_first_round(monkeypatch, tmp_path, expect_error):
    def broadcast(self, model):
        self.ema = model
        return broadcast_of_all(self, model)

    broadcast_of_all = FederatedStrategy.broadcast
    monkeypatch.setattr("contrafed.strategies.fedavg.FedAvg.broadcast", broadcast, raising=False)
    with expect_error():
        run(config_of(*SMALL_RUN, "strategy=fedavg", f"output_dir={tmp_path}/run"))
