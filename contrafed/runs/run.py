"""Execute one run from a composed configuration: ``run(cfg) -> summary`` for notebooks, ``run_resolved`` for the command
line.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from contrafed.config.compose import compose_job
from contrafed.config.run_config import Run
from contrafed.core.errors import UserError
from contrafed.runs.output import alone, quiet_libraries
from contrafed.runs.setup import check_config, with_folder

OnRound = Callable[[int, dict[str, float]], None]


def compose(*overrides: str, config_dir: str | Path | None = None) -> DictConfig:
    """Compose a configuration as the command line does: ``compose("strategy=moon", "num_rounds=10")``.

    Args:
        *overrides: Overrides, one text each.
        config_dir: Your folder of YAMLs, as for ``--config-dir``.

    Raises:
        UserError: For an unknown choice or key.
    """
    if not all(isinstance(override, str) for override in overrides):
        raise UserError('compose takes overrides as text, one by one: compose("strategy=moon", "num_rounds=10")')
    return compose_job(list(overrides), config_dir)


def run(cfg: DictConfig | Mapping[str, Any], *, unique: bool = True, on_round: OnRound | None = None) -> dict[str, Any]:
    """Run one experiment and return its summary.

    Args:
        cfg: The composed configuration.
        unique: Use ``output_dir-2`` and so on if ``output_dir`` already holds a run. Otherwise that is an error.
        on_round: Called as ``on_round(server_round, values)`` after every round, and after the initial model's evaluation as
            round 0. The names of ``values`` are SCOPE/SPLIT/METRIC as in ``metrics.csv``. An exception from it ends the run,
            and everything so far is written.

    Returns:
        The content of ``summary.json``, and the run's folder under ``"folder"``.

    Raises:
        UserError: For a mistake in the configuration or the data, if possible before a folder is made.
    """
    if not isinstance(cfg, DictConfig | Mapping):
        raise UserError('run takes what compose returns: run(compose("strategy=moon", "num_rounds=10"))')
    with _torch_defaults():
        return run_resolved(check_config(cfg), unique=unique, on_round=on_round)


@contextlib.contextmanager
def _torch_defaults() -> Iterator[None]:
    """Run a block with torch's own default dtype and grad mode, and restore those of the notebook."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(before)


def run_resolved(wanted: Run, *, unique: bool = True, on_round: OnRound | None = None) -> dict[str, Any]:
    """Run one experiment whose configuration is resolved, as ``run`` does.

    The data are loaded and the model is built here, before a folder is made, so that a mistake in them leaves no folder. The
    ``Session`` builds the strategy once the engine knows its clients.
    """
    if wanted.client.partition.name == "own":
        raise UserError("partition=own goes with flwr run: simulated clients have no data of their own")
    quiet_libraries(wanted.verbose)  # sets what Flower and Ray read when they are imported
    from contrafed.check.before_run import check_before_run
    from contrafed.config.method import check_batches, check_model
    from contrafed.data.federation import load_federation
    from contrafed.engines.engine_run import EngineRun
    from contrafed.runs.evaluation import initial_file, initial_model
    from contrafed.runs.server_app import app_for
    from contrafed.training.workspace import make_model

    federation = load_federation(wanted.client)
    model = make_model(wanted.client, federation)
    check_model(wanted, model)
    check_batches(wanted, model, federation.partition.sizes)
    check_before_run(wanted, federation, model)
    initial_model(model.tensors(), initial_file(wanted), model.frozen_tensors())
    ready = with_folder(wanted, federation.data.fingerprint, unique)
    assert ready.folder is not None
    with alone(ready.folder):
        engine_run = EngineRun(app_for(ready, on_round), ready.client, federation, model, ready.verbose)
        ready.engine.module.run(ready.engine.config, engine_run)
    summary: dict[str, Any] = json.loads((ready.folder / "summary.json").read_text(encoding="utf-8"))
    return {**summary, "folder": str(ready.folder)}
