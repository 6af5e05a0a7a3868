"""Open a run's recorder, and state what a run was."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contrafed.config.run_config import Run
from contrafed.data.loaded import about_loaded
from contrafed.runs import checkpoint
from contrafed.runs.notices import said_of_attack
from contrafed.runs.output import RunRecorder, versions
from contrafed.runs.output.log_file import DAMAGED
from contrafed.runs.output.provenance import commit, hardware
from contrafed.training.workspace import Workspace


def open_recorder(run: Run, folder: Path, resumed: checkpoint.Checkpoint | None) -> RunRecorder:
    """Return the run's recorder. A run that resumes in another folder copies its logs."""
    first_round = 0 if run.evaluate_only else 1
    if resumed is None:
        return RunRecorder(folder, run.text, first_round)
    source, damaged = resumed.path.parent.parent, checkpoint.find_damaged_logs(resumed)
    for name in damaged:
        path = folder / f"{name}.csv"
        if path.exists():
            path.replace(path.with_name(path.name + DAMAGED))
        print(f"{name}.csv: it is missing or was changed, and starts again with round {resumed.server_round + 1}", flush=True)
    sizes = {name: size for name, size in resumed.logs.items() if name not in damaged}
    if source.resolve() != folder.resolve():
        for name in sizes:
            shutil.copyfile(source / f"{name}.csv", folder / f"{name}.csv")
        if run.tracker.name == "tensorboard" and (source / "tensorboard").is_dir():  # the new writer hides later rounds
            shutil.copytree(source / "tensorboard", folder / "tensorboard", dirs_exist_ok=True)
    return RunRecorder(folder, run.text, first_round, sizes)


def facts(run: Run, workspace: Workspace) -> dict[str, Any]:
    """Return the entries that identify a run in its summary."""
    small, data = workspace.federation.partition.small, workspace.federation.data
    return {
        "method": run.client.strategy.name,
        "dataset": run.client.dataset.name,
        **({"stand_in": data.stand_in} if data.stand_in else {}),
        **({"data": about_loaded(data, data.warnings)} if len(data.y) else {}),
        **({key: run.composed[key] for key in ("experiment", "scale") if run.composed.get(key)}),
        "partition": run.client.partition.name,
        **({f"partition_small_{n}": v for n, v in asdict(small).items()} if small.clients else {}),
        "participation": run.participation.name,
        **said_of_attack(run),
        "model": run.client.model.name,
        "engine": run.engine.name,
        "seed": run.seed,
        "federation_seed": run.seed_of_federation,
        "num_clients": run.num_clients,
        "num_rounds": run.num_rounds,
        **({"resumed_from": run.resume} if run.resume else {}),
        **({"evaluate_only": run.evaluate_only} if run.evaluate_only else {}),
        "parameters": sum(value.numel() for value in workspace.initial.values()),
        "device": str(workspace.device),
        "hardware": hardware(str(workspace.device)),
        "versions": versions(),
        **({"commit": commit()} if commit() else {}),
    }
