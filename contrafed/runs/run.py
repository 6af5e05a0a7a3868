"""One run from a composed configuration: ``run(cfg) -> summary``, for notebooks and for ``main.py``."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from contrafed.config.compose import compose_job
from contrafed.core.errors import UserError
from contrafed.runs.output import alone
from contrafed.runs.setup import checked, with_folder


def compose(*overrides: str, config_dir: str | Path | None = None) -> DictConfig:
    """Compose a configuration as the command line does: ``compose("strategy=moon", "num_rounds=10")``.

    ``config_dir``: a folder of YAMLs of your own, as ``--config-dir`` takes it. Raises ``UserError``.
    """
    if not all(isinstance(override, str) for override in overrides):
        raise UserError('compose takes overrides as text, one by one: compose("strategy=moon", "num_rounds=10")')
    return compose_job(list(overrides), config_dir)


def run(
    cfg: DictConfig | Mapping[str, Any],
    *,
    unique: bool = True,
    on_round: Callable[[int, dict[str, float]], None] | None = None,
) -> dict[str, Any]:
    """Run one experiment and return its summary (what ``summary.json`` holds), with the run's folder under ``"folder"``.

    ``unique``: when ``output_dir`` already holds a run, take ``output_dir-2`` and so on; otherwise that is an error.
    ``on_round(server_round, values)`` is called after every round, and after the initial model's evaluation as round 0; the
    names of ``values`` are SCOPE/SPLIT/METRIC as in ``metrics.csv``. What it raises ends the run, with what there is written.
    Raises ``UserError`` for anything wrong with the configuration or the data, before a folder is made where it can.
    """
    if not isinstance(cfg, DictConfig | Mapping):
        raise UserError('run takes what compose returns: run(compose("strategy=moon", "num_rounds=10"))')
    wanted = checked(cfg)
    if wanted.node.partition.name == "own":
        raise UserError("partition=own goes with flwr run: simulated nodes have no data of their own")
    # After checked(), which sets what Flower and Ray read when they are imported.
    from contrafed.data.federation import load_federation
    from contrafed.engines.job import Job
    from contrafed.runs.evaluation import initial_file, initial_model
    from contrafed.runs.server_app import app_for
    from contrafed.training.workspace import make_model

    federation = load_federation(wanted.node)  # before a folder is made: a mistake in the data or a file leaves none behind
    initial_model(dict(make_model(wanted.node, federation).named_parameters()), initial_file(wanted))
    ready = with_folder(wanted, unique)
    assert ready.folder is not None
    with alone(ready.folder):
        ready.engine.module.run(ready.engine.config, Job(app_for(ready, on_round), ready.node, federation, ready.verbose))
    summary: dict[str, Any] = json.loads((ready.folder / "summary.json").read_text(encoding="utf-8"))
    return {**summary, "folder": str(ready.folder)}
