"""A small run that stops in the middle of a round, with checkpoints, and what a finished one leaves."""

import pytest
from helpers import TWO_STEPS, config_of, same
from safetensors.torch import load_file

from contrafed.runs.output import RoundLog
from contrafed.runs.run import run

SMALL_RUN = (
    "engine=local", "num_clients=8", "num_rounds=7", "eval_every=2", "model=mlp", "model.hidden=[8]", "model.projection=[6]",
    "partition.test_fraction=0.2", "participation=markovian", "participation.mean_probability=0.5", "participation.p01=0.5",
    *TWO_STEPS,
)  # fmt: skip


def outcome(folder):
    return load_file(folder / "model.safetensors"), *((folder / f"{n}.csv").read_bytes() for n in ("metrics", "clients"))


def equal(a, b):
    return same(a[0], b[0]) and a[1:] == b[1:]


def stop_in(server_round, monkeypatch):
    """Let the next run stop in the middle of a round's bookkeeping."""
    write = RoundLog.write

    def fatal(self, done):
        if done.server_round == server_round:
            raise RuntimeError("stopped here")
        write(self, done)

    monkeypatch.setattr(RoundLog, "write", fatal)


def run_small(folder, *overrides, method="pmfl", **options):
    """Run a method on the small problem, and return the summary."""
    return run(config_of(f"strategy={method}", *SMALL_RUN, *overrides, f"output_dir={folder}"), **options)


def make_stopped_run(folder, *overrides):
    """Make a run that stopped in round 6, with checkpoints of rounds 2 and 4, and return its folder."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="stopped here"):
        stop_in(6, patch)
        run(config_of(*SMALL_RUN, *overrides, "checkpoint_every=2", f"output_dir={folder}"))
    return folder
