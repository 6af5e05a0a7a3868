"""One run from a composed configuration: ``run(cfg) -> summary``, for notebooks and for ``main.py``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from contrafed.prepare import checked, with_folder
from contrafed.settings import engine_config
from core import registry
from core.errors import UserError


def compose(*overrides: str) -> DictConfig:
    """Compose a configuration as the command line does: ``compose("strategy=moon", "num_rounds=10")``."""
    from contrafed.cli import compose_job

    return compose_job(list(overrides))


def run(cfg: DictConfig | Mapping[str, Any], *, unique: bool = True) -> dict[str, Any]:
    """Run one experiment and return its summary (what ``summary.json`` holds), with the run's folder under ``"folder"``.

    ``unique``: when ``output_dir`` already holds a run, take ``output_dir-2`` and so on; otherwise that is an error.
    Raises ``UserError`` for anything wrong with the configuration or the data, before a folder is made where it can.
    """
    config = checked(cfg)
    if config["partition"]["name"] == "own":
        raise UserError("partition=own goes with flwr run: simulated nodes have no data of their own")
    # After checked(), which sets what Flower and Ray read when they are imported.
    from clients.training.workspace import node_settings
    from contrafed.server_app import app as server_app
    from partitions.federation import load_federation
    from simulation.engine import Job

    federation = load_federation(config)  # before a folder is made: a mistake in the data leaves none behind
    ready = with_folder(config, unique)
    job = Job(server_app, config, node_settings(config), json.dumps(ready), federation)
    folder = Path(ready["folder"])
    engine = registry.find("simulation", "engine", config["engine"])
    engine.run(engine_config(config["engine"]), job)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {**summary, "folder": str(folder)}
