"""The tiny experiment that engines are compared on."""

import os

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from helpers import config_of, few_steps, same, workspace_of
from safetensors.torch import load_file

from contrafed.core import codec
from contrafed.core.client_run import client_run_of
from contrafed.engines.worker import FIRST_NODE_ID
from contrafed.runs.run import run

TINY_RUN = (
    "partition.test_fraction=0.2", "num_clients=6", "num_rounds=3", "eval_every=1", "model=mlp", "model.hidden=[12]",
    "partition.min_client_size=5",
)  # fmt: skip
HALF_AVAILABLE = ("participation=bernoulli", "participation.beta=null", "participation.mean_probability=0.5")


def run_tiny(folder, *overrides):
    """Run the tiny experiment, and return (summary, final model, metrics.csv, clients.csv)."""
    config = config_of(*TINY_RUN, *HALF_AVAILABLE, f"output_dir={folder}", *overrides)
    given = [override.removeprefix("strategy.local.").partition("=")[0] for override in overrides]
    summary = run(config | {"strategy": few_steps(config["strategy"], given)})
    out = summary["folder"]
    read = lambda name: open(os.path.join(out, name), "rb").read()  # noqa: E731, SIM115
    return summary, load_file(os.path.join(out, "model.safetensors")), read("metrics.csv"), read("clients.csv")


def equals_local(found, local):
    """Assert that a run of ``run_tiny`` has no failures and the bytes of engine=local."""
    assert found[0]["failures"] == found[0]["replies_rejected"] == 0
    assert same(found[1], local[1])
    assert found[2:] == local[2:]


def engines_agree(folder, engine, *overrides):
    """Assert that a run leaves the same models and logs with an engine as with engine=local, one client a stack."""
    for name, more in (("local", ["engine.stack_size=1"]), (engine, [])):
        summary = run(config_of(*overrides, f"engine={name}", *more, f"output_dir={folder}/{name}"))
        assert summary["failures"] == summary["replies_rejected"] == 0
    for name in ("metrics.csv", "clients.csv", "participants.csv", "model.safetensors"):
        assert (folder / engine / name).read_bytes() == (folder / "local" / name).read_bytes()
    for path in (folder / "local").rglob("*.safetensors"):
        assert same(load_file(path), load_file(folder / engine / path.relative_to(folder / "local"))), path


def tiny_workspace(*overrides):
    config = config_of(*TINY_RUN, *overrides)
    workspace = workspace_of(config)
    return config, workspace, client_run_of(config).to_json()


def train_message(workspace, settings, client=0, server_round=1):
    record = codec.to_record({f"model/{n}": v for n, v in workspace.initial.items()})
    scalars = ConfigRecord({"server-round": server_round, "settings": settings, "cost": 1})
    return Message(RecordDict({"arrays": record, "config": scalars}), FIRST_NODE_ID + client, MessageType.TRAIN)
