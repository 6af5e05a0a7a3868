"""``python main.py check strategy=NAME model=NAME dataset=NAME``: test an author's method, network and data.

Each check is one line: ok, failed with the author's line and a fix, or skipped. Nothing is written. The same keys as of a run
are accepted. Exit status: 0 if all checks succeed, 1 if one fails, 2 for a wrong command line or configuration.
"""

import time
from typing import Any

from contrafed.config.command_line import check_yaml, read_arguments
from contrafed.config.overrides import rename_arguments
from contrafed.config.run_config import Run, resolve
from contrafed.core.errors import UserError

LARGE_DATA = 20_000  # examples: a larger set is loaded once only


def check_command(arguments: list[str]) -> int:
    """Run all checks, print a line of each, and return the exit status. Raises ``UserError`` for a wrong command line."""
    asked = read_arguments(arguments)
    if asked.help:
        print(__doc__)
        return 0
    if asked.multirun or asked.cfg is not None or asked.info is not None or asked.shell_completion:
        raise UserError("check takes KEY=VALUE and --config-dir, one method at a time. Fix: leave the other options out")
    began = time.perf_counter()
    values = check_yaml(rename_arguments(asked.overrides), asked.config_dir)
    counts = {"ok": 0, "failed": 0, "skipped": 0}
    for name, result, found in check_run(resolve(values)):
        counts[result] += 1
        print(f"{result:<8}{name}{': ' if found else ''}{found}", flush=True)
    said = ", ".join(f"{count} {result}" for result, count in counts.items() if count)
    print(f"{sum(counts.values())} checks in {time.perf_counter() - began:.0f} s: {said}")
    return int(bool(counts["failed"]))


def check_run(run: Run) -> Any:
    """Yield name, result and finding of each check of a run's data, network and method. Raises ``UserError``."""
    import torch

    from contrafed.check.checks import run_checks
    from contrafed.check.problem import make_problem
    from contrafed.config.method import check_batches, check_model
    from contrafed.training.workspace import make_model

    if run.client.partition.name == "own":
        raise UserError("partition=own: only devices have its examples. Fix: another partition and dataset for check")
    torch.set_num_threads(1)
    federation, *found = load_twice(run)
    yield from found
    model = make_model(run.client, federation)
    check_model(run, model)
    check_batches(run, model, federation.partition.sizes)
    yield from run_checks(make_problem(run, federation, model))


def load_twice(run: Run) -> Any:
    """Return the data, and one result: whether loading and partitioning them draws from no global generator."""
    import numpy as np

    from contrafed.check.fault import Fault
    from contrafed.check.lines import Author, first_change
    from contrafed.core.randomness import read_global_state
    from contrafed.data.federation import load_federation

    author = Author([run.client.dataset.module, run.client.partition.module])
    before = read_global_state()
    federation = load_federation(run.client)
    name, fix = "data and partition are a function of the seed", "numpy.random.default_rng(SEED), or draw.rng in a partition"
    data, partition = federation.data, federation.partition
    line = "" if read_global_state() == before else first_change(author, read_global_state, lambda: load_federation(run.client))
    if read_global_state() != before:
        fault = Fault("loading draws from the global random state", fix, line)
        return federation, (name, "failed", str(fault))
    if len(data.y) <= LARGE_DATA:
        again = load_federation(run.client)
        clients = range(min(run.num_clients, 100))
        same = all(np.array_equal(partition.train(k), again.partition.train(k)) for k in clients)
        if again.data.fingerprint != data.fingerprint or not same:
            what = "partitions" if again.data.fingerprint == data.fingerprint else "loads of the data"
            return federation, (name, "failed", str(Fault(f"two {what} differ", fix)))
    return federation, (name, "ok", data.warnings[0] if data.warnings else "")
