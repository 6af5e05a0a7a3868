"""Prepare a ``Run``: check it, load its data, make its folder, and find the checkpoint that it resumes from."""

import shlex
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from contrafed.config.compose import compose_job, to_plain
from contrafed.config.run_config import Run, resolve
from contrafed.config.unused import warn_of_unused
from contrafed.core.errors import UserError, nearest
from contrafed.core.run_folder import read_config, read_summary
from contrafed.runs.output import claim_folder, quiet_libraries
from contrafed.runs.output.folder import read_finished_summary

LATEST_RUN = "latest"


def compose_deployed_run(overrides: str, num_clients: int | None = None, config_dir: str = "") -> Run:
    """Return a run that ``flwr run`` started, with its folder made.

    Args:
        overrides: Hydra overrides in one string.
        num_clients: Number of clients, if it is known. The run uses it unless the overrides set another.
        config_dir: The user's folder of YAMLs, "" for none.

    Raises:
        UserError: For any mistake in them.
    """
    try:
        words = shlex.split(overrides)
    except ValueError as error:
        raise UserError(f"overrides: {overrides!r} cannot be read ({error})") from error
    if num_clients is not None and not any(
        word.startswith(("num_clients=", "experiment=", "evaluate_only=")) for word in words
    ):
        words.append(f"num_clients={num_clients}")
    wanted = check_config(compose_job(words, config_dir))
    if num_clients is not None and wanted.num_clients != num_clients:
        raise UserError(
            f"num_clients={wanted.num_clients}, but this federation has {num_clients} SuperNodes: set "
            f"num_clients={num_clients}, or flwr run . --federation-config 'num-supernodes={wanted.num_clients}'"
        )
    check_latest(wanted, names_folder(words))
    from contrafed.config.method import check_model
    from contrafed.training.workspace import workspace_for

    if num_clients is not None:
        from contrafed.engines.flower import refuse_timeout

        refuse_timeout(wanted.engine.config.round_timeout)
    if num_clients is not None and (wanted.checkpoint_every is not None or wanted.resume is not None):
        raise UserError("checkpoint_every and resume: Flower's simulation keeps client state itself. Fix: main.py, or devices")
    if num_clients is None and getattr(wanted.privacy.config, "seeded_noise", False):
        raise UserError("privacy.seeded_noise=true: all devices know the seed. Fix: privacy.seeded_noise=false")
    if num_clients is None and getattr(wanted.privacy.config, "amplification", False):
        raise UserError("privacy.amplification=true hides who participates, which all devices know from the seed")
    if num_clients is None and wanted.clock.name != "none":
        raise UserError(f"clock={wanted.clock.name} simulates time, and devices take their own. Fix: clock=none")
    if wanted.schedule.name != "synchronous":
        raise UserError(f"schedule={wanted.schedule.name}: clients of flwr run take their own time. Fix: use main.py")
    if num_clients is None and wanted.attack.name != "none":
        raise UserError(f"attack={wanted.attack.name} goes with simulation: devices never attack at a server's word")
    # The Session takes the same workspace, with the only model that is built here.
    workspace = workspace_for(wanted.client.to_json())
    check_model(wanted, workspace.model)
    for line in warn_of_unused([(words, wanted)]):
        print(line, flush=True)
    return with_folder(wanted, workspace.federation.data.fingerprint, unique=True, devices=num_clients is None)


def check_config(cfg: DictConfig | Mapping[str, Any]) -> Run:
    """Return the run that a configuration describes, and silence libraries. Raises ``UserError``."""
    composed: Any = to_plain(cfg) if isinstance(cfg, DictConfig) else dict(cfg)
    quiet_libraries(bool(composed.get("verbose", False)))
    return resolve(composed)


def names_folder(overrides: Iterable[str]) -> bool:
    """Return whether a command line names the run's folder."""
    return any(override.lstrip("+").startswith("output_dir=") for override in overrides)


def check_latest(wanted: Run, named: bool) -> None:
    """Raise ``UserError`` if ``resume=latest`` has no folder to resume in, because an unnamed folder is new."""
    if wanted.resume == LATEST_RUN and not named:
        raise UserError("resume=latest needs the folder of the run. Fix: output_dir=FOLDER")


def with_folder(wanted: Run, images: str, unique: bool, devices: bool = False) -> Run:
    """Return the run with its folder, made here, and with its checkpoint if it is resumed. ``images``: their fingerprint."""
    _check_evaluated(wanted, images)
    start = starting_point(wanted, images, devices)
    folder = Path(wanted.output_dir)
    if wanted.resume != LATEST_RUN or not (folder / "config.yaml").exists():
        folder = claim_folder(folder, unique=unique)
        if folder.resolve() != Path(wanted.output_dir).resolve():
            print(f"{wanted.output_dir} has a run already: this one's folder is {folder}", flush=True)
    return replace(wanted, resume=start, folder=folder)


def _other_data(run: Run, images: str, before: str | None, whose: str, fix: str = "") -> str:
    """Return what is wrong if a run's data have another fingerprint than ``before``, empty if nothing is known to be."""
    from contrafed.data.fingerprint import fingerprint_run

    if not before or before == fingerprint_run(images, run.client.partition, run.participation, run.clock):
        return ""
    what = f"the data, or the files of partition, participation or clock, are not those of {whose}"
    return f"{what}. Fix: put them back as they were{fix}"


def _check_evaluated(wanted: Run, images: str) -> None:
    """Raise ``UserError`` if the data are not those of the run that ``evaluate_only`` names: its parts would be others."""
    if not wanted.evaluate_only:
        return
    summary = read_summary(Path(wanted.evaluate_only)) or {}
    if fault := _other_data(wanted, images, summary.get("data_fingerprint"), wanted.evaluate_only):
        raise UserError(f"evaluate_only: {fault}")


def check_files(run: Run, there: Path, summary: Mapping[str, Any], images: dict[str, str]) -> None:
    """Raise ``UserError`` if a finished run had other files of data or of initial weights than a sweep's job has.

    Args:
        run: The job.
        there: The folder of the finished run.
        summary: Its summary.
        images: The fingerprints of data sets that were loaded, to which this one's is added.
    """
    from contrafed.data.fingerprint import find_changed_weights, fingerprint_weights
    from contrafed.data.images import load_images

    if key := find_changed_weights(
        summary.get("weights_fingerprint", {}), fingerprint_weights(run.init_from, run.client.model)
    ):
        raise UserError(f"the file of {key} is not that of its run in {there}. Fix: put it back, or name another output_dir")
    dataset, files = run.client.dataset, (run.client.partition, run.participation, run.clock)
    before = summary.get("data_fingerprint")
    # Data that Contrafed downloads do not change.
    repository = getattr(dataset.config, "repository", None)
    own = dataset.is_own or (repository is not None and Path(repository).expanduser().is_dir())
    if before is None or not (own or any(getattr(choice.config, "path", None) for choice in (dataset, *files))):
        return
    if (name := repr((dataset.name, dataset.config))) not in images:
        images[name] = load_images(dataset).fingerprint
    if fault := _other_data(run, images[name], before, f"its run in {there}", ", or name another output_dir"):
        raise UserError(fault)


def check_launcher(name: str) -> None:
    """Raise ``UserError`` if Hydra's launcher of this class cannot work on this machine."""
    if name == "SlurmLauncher" and shutil.which("srun") is None:
        fix = "start it on a machine of the cluster, or hydra/launcher=submitit_local"
        raise UserError(f"hydra/launcher=submitit_slurm: this machine has no srun. Fix: {fix}")


def check_shared_folder(jobs: Iterable[Iterable[str]], runs: Iterable[Run]) -> None:
    """Raise ``UserError`` if the command lines of a sweep's jobs name several folders, or one that depends on the job."""
    named = {line.partition("=")[2] for lines in jobs for line in lines if names_folder([line])}
    if len(named) == 1 and "${" in (name := next(iter(named))) and "${now:" not in name:
        named = {run.output_dir for run in runs}
    if len(named) > 1:
        raise UserError(
            f"output_dir: {' and '.join(sorted(named)[:2])}, but a sweep has one folder, in which each job has its own. "
            "Fix: one folder, in quotes if its name has a comma"
        )


def in_sweep() -> bool:
    """Return whether this is a job of Hydra's sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def starting_point(wanted: Run, images: str, devices: bool = False) -> str | None:
    """Return the path of the checkpoint that ``resume`` means, None to begin. Raises ``UserError`` where it does not fit.

    Args:
        wanted: The run.
        devices: Whether clients are devices, which keep their own state.

    Raises:
        UserError: If the checkpoint does not fit.
    """
    from contrafed.data.fingerprint import find_changed_weights, fingerprint_weights
    from contrafed.runs import checkpoint

    if wanted.resume is None:
        return None
    latest = wanted.resume == LATEST_RUN
    where = wanted.output_dir if latest else wanted.resume
    found = checkpoint.find(where)
    if found is not None:
        # A job of a sweep never continues another job that has finished.
        done = latest and in_sweep() and read_finished_summary(Path(wanted.output_dir)) is not None
        free = () if done else ("num_rounds",)
        checkpoint.check_same(found.path, found.config, wanted.composed, compares_ends=done, free=free)
        if wanted.num_rounds != found.config.get("num_rounds"):
            found = checkpoint.find_extensible(where, found, wanted.num_rounds)
        checkpoint.check_logs(found)
        if fault := _other_data(wanted, images, found.data, str(found.path), ", or begin the run in another folder"):
            raise UserError(f"resume: {fault}")
        if key := find_changed_weights(found.weights, fingerprint_weights(wanted.init_from, wanted.client.model)):
            raise UserError(
                f"resume: the file of {key} is not that of {found.path}. "
                "Fix: put it back as it was, or begin the run in another folder"
            )
        if devices != bool(found.grid):
            kept, how = ("in the checkpoint", "main.py") if devices else ("on devices", "flwr run")
            raise UserError(f"resume: the client state of {found.path} is {kept}. Fix: resume it with {how}")
        return str(found.path)
    if not latest:
        near = nearest(wanted.resume, [LATEST_RUN]).removesuffix("?")
        raise UserError(f"resume: there is no whole checkpoint in {wanted.resume}{near}. Fix: check the path, or resume=latest")
    folder = Path(wanted.output_dir)
    if there := checkpoint.list_checkpoints(folder / checkpoint.FOLDER):
        older = f"{there[-1]} and {len(there) - 1} before it cannot be read"
        raise UserError(f"resume: damaged, or written by an older version: {older}. Fix: delete the folder to start again")
    config = folder / "config.yaml"
    if config.exists() and config.stat().st_size:  # only the same run may restart after a stop before its first checkpoint
        if read_finished_summary(folder) is not None:
            raise UserError(f"resume: {folder} holds a finished run without checkpoints. Fix: another output_dir")
        checkpoint.check_same(folder, read_config(folder), wanted.composed)
    print(f"no checkpoint in {folder}: beginning with round 1", flush=True)
    return None


def load_data(runs: list[Run]) -> None:
    """Load or download the data of several runs, so that missing data are reported once. Raises ``UserError``."""
    from contrafed.data.images import load_images

    if len(runs) > 1:
        for dataset in {
            repr((run.client.dataset.name, run.client.dataset.config)): run.client.dataset for run in runs
        }.values():
            load_images(dataset)


def count_rounds_left(run: Run, there: Path | None) -> int:
    """Return the rounds after the last checkpoint of a job's earlier run."""
    from contrafed.runs import checkpoint

    done = checkpoint.list_checkpoints(there / checkpoint.FOLDER) if there is not None else []
    return run.num_rounds - (int(done[-1].name) if done else 0)
