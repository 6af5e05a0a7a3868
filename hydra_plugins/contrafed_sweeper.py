"""Run an experiment's grid: check it as a whole, skip finished jobs, and resume stopped ones.

    python main.py -m experiment=pmfl/table1                            the whole grid, in outputs/pmfl/table1
    python main.py -m experiment=pmfl/table1 strategy=pmfl seed=0,1     a part of it, and a second seed
    python main.py -m experiment=pmfl/table1 shard=2/4                  every fourth job, from the second
    python main.py -m hydra/launcher=joblib seed=0,1                    two jobs at a time

Every job is composed and checked before the first starts. Jobs whose configurations are already in the folder of an
experiment's sweep are not run again, or resume where they stopped. Hydra looks for sweepers only in this folder and imports it
in every Hydra program, so Contrafed is imported only when it is used.
"""

import contextlib
import shutil
import statistics
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper

if TYPE_CHECKING:
    from hydra.plugins.launcher import Launcher
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from contrafed.config.compose import Job
    from contrafed.config.loader import ConfigLoader
    from contrafed.config.run_config import Run

OUTPUTS = Path("outputs")
POLL_SECONDS = 0.5  # between two checks of another process
CHECKPOINTS = 20  # that an experiment's job writes by default
MIN_CHECKPOINT_ROUNDS = 10  # between two of these
MAX_NAMED_JOBS = 5  # failed jobs that the last line names


@dataclass
class SweeperConfig:
    """The sweeper's settings in Hydra's configuration, ``hydra.sweeper``."""

    _target_: str = "hydra_plugins.contrafed_sweeper.ContrafedSweeper"
    shard: str | None = None  # I/N: every Nth job from the Ith
    params: dict[str, Any] | None = field(default_factory=dict)  # more axes, key -> values as on a command line
    only_list: bool = False  # list the jobs and run none


ConfigStore.instance().store(group="hydra/sweeper", name="contrafed", node=SweeperConfig, provider="contrafed")


class Left(NamedTuple):
    """A job that still has to run, with its run as configured."""

    job: "Job"
    run: "Run"
    home: Path  # the folder of its sweep


class ContrafedSweeper(Sweeper):
    """Runs the jobs of a command line with the launcher in Hydra's configuration."""

    config: "DictConfig"
    launcher: "Launcher"

    def __init__(self, shard: str | None = None, params: dict[str, Any] | None = None, only_list: bool = False) -> None:
        self.shard, self.params, self.only_list = shard, params, only_list
        self.failures: list[tuple[Any, bool]] = []  # and whether the reason was a user's mistake
        self.folders: list[Path] = []  # of the finished runs, in the order of the jobs
        self.elsewhere = 0  # jobs that another process is at
        self.diverged = 0  # finished jobs whose model diverged
        self._paces: dict[tuple[str, str], list[float]] = {}  # (method, data set) -> seconds a round
        self._fingerprints: dict[str, str] = {}  # of the images of each data set
        self._there: dict[Path, dict[str, Path]] = {}  # what each folder held: identity -> run

    def setup(self, *, hydra_context: "HydraContext", task_function: "TaskFunction", config: "DictConfig") -> None:
        """Store Hydra's objects."""
        self.config, self.loader = config, cast("ConfigLoader", hydra_context.config_loader)
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[JobReturn]:
        """Run every remaining job and return their results. Raises ``UserError``."""
        from contrafed.config.command_line import check_jobs
        from contrafed.config.compose import expand_jobs, take_shard
        from contrafed.config.fairness import find_differing_training, warn_of_differing_training
        from contrafed.config.unused import warn_of_unused
        from contrafed.runs.launch import check_objective
        from contrafed.runs.output import quiet_libraries
        from contrafed.runs.setup import check_latest, check_shared_folder, names_folder

        quiet_libraries(bool(self.config.get("verbose")))  # before they are imported

        asked = {line.partition("=")[0] for line in arguments}
        more = [f"{key}={value}" for key, value in (self.params or {}).items() if key not in asked]
        every = expand_jobs([*more, *arguments], loader=self.loader)
        runs = check_jobs(every, self.loader.own)
        check_shared_folder((job.overrides for job in every), runs)
        for run in runs:
            check_objective(run)
        self.named = names_folder(arguments) or any(
            str(o).startswith("hydra.sweep.dir=") for o in self.config.hydra.overrides.hydra
        )
        for experiment in dict.fromkeys(job.experiment for job in every if job.experiment is not None and not self.named):
            self.loader.check_output_dir(experiment)
        check_latest(runs[0], self.named or every[0].experiment is not None)
        chosen = take_shard(list(zip(every, runs, strict=True)), self.shard)
        if self.only_list:
            lines = [f"[job {job.number}] {' '.join(job.overrides)}" for job, _ in chosen]
            print("\n".join([*lines, "1 job" if len(chosen) == 1 else f"{len(chosen)} jobs"]))
            return []
        self.jobs = [Left(job, run, self._find_home(job, run)) for job, run in chosen]
        if line := warn_of_differing_training(
            find_differing_training((run.client.strategy.name, run.composed) for run in runs)
        ):
            print(line, flush=True)
        for line in warn_of_unused((job.overrides, run) for job, run in chosen):
            print(line, flush=True)
        returned = self._run()
        self.report_failures()
        return returned

    def report_failures(self) -> None:
        """Name the failed jobs, if there are any, and end the process with their exit status."""
        if self.failures:
            names = [" ".join(job.overrides) for job, _ in self.failures[:MAX_NAMED_JOBS]]
            more = [f"and {len(self.failures) - MAX_NAMED_JOBS} more"] if len(self.failures) > MAX_NAMED_JOBS else []
            print(f"error: {len(self.failures)} job(s) failed: {'; '.join([*names, *more])}", file=sys.stderr)
            raise SystemExit(2 if all(mistake for _, mistake in self.failures) else 1)

    def _run(self) -> list[JobReturn]:
        from contrafed.runs.output.folder import make_folder
        from contrafed.runs.setup import check_launcher, load_data

        check_launcher(type(self.launcher).__name__)
        self._check_folders()
        self.config.hydra.sweep.dir = str(self.jobs[0].home)  # launchers make it
        for each in self.jobs:
            make_folder(each.home)
            if each.home not in self._there:
                self._there[each.home] = find_runs(each.home) if each.job.experiment is not None else {}
        left = [each for each in self.jobs if not self._skip_finished(each)]
        what = "" if not self.folders else f", {len(self.folders)} of them finished already"
        jobs = "1 job" if len(self.jobs) == 1 else f"{len(self.jobs)} jobs"
        print(f"{jobs}{what}: {len(left)} to run in {self.jobs[0].home}", flush=True)
        load_data([each.run for each in left])
        returned: list[JobReturn] = []
        # Hydra's basic launcher runs jobs in turn in this process, so they are launched one at a time, with the number of
        # remaining jobs.
        alone = type(self.launcher).__name__ == "BasicLauncher"
        try:
            for number, batch in enumerate([[each] for each in left] if alone else [left] if left else []):
                if alone:
                    to_go = self._estimate_time(left[number:])
                    overrides = " ".join(batch[0].job.overrides)
                    print(f"\n[job {batch[0].job.number}, {len(left) - number} left{to_go}] {overrides}", flush=True)
                returned += self._launch(batch)
            if len(self.jobs) > 1:
                counts = {"of them diverged": self.diverged, "failed": len(self.failures)}
                counts["left to another process"] = self.elsewhere
                ends = ", ".join(f"{count} {what}" for what, count in counts.items() if count or what == "failed")
                print(f"\n{len(self.folders)} of {len(self.jobs)} jobs finished, {ends}", flush=True)
        finally:  # also of a sweep that is stopped
            self._write_report()
        return returned

    def _launch(self, batch: list[Left]) -> list[JobReturn]:
        """Pass jobs to the launcher, except those that another process or an equal job of the batch runs."""
        from contrafed.runs.checkpoint import identity

        ready: list[tuple[Left, Path]] = []
        first: dict[Any, int] = {}  # sweep's folder and configuration -> position in ready
        twins: list[tuple[Left, int]] = []
        for each in batch:
            # Jobs without an experiment are numbered, and all run.
            key = (each.home, identity(each.run.composed) if each.job.experiment is not None else each.job.number)
            if key in first:
                twins.append((each, first[key]))
                print(f"job {each.job.number} is the same run as job {ready[first[key]][0].job.number}", flush=True)
            elif (folder := self._find_folder(each, {chosen for _, chosen in ready})) is not None:
                first[key] = len(ready)
                ready.append((each, folder))
        if not ready:
            return []
        lines = [self._override_job(each, folder) for each, folder in ready]
        returned = list(self.launcher.launch(lines, initial_job_idx=ready[0][0].job.number))
        for (each, folder), done in zip(ready, returned, strict=True):
            self._record(each, folder, done)
        for each, position in twins:
            self._record(each, ready[position][1], returned[position])
        return returned

    def _record(self, each: Left, folder: Path, done: JobReturn) -> None:
        """Store the result of a job."""
        from contrafed.core.errors import UserError
        from contrafed.runs import checkpoint
        from contrafed.runs.output.folder import is_held_elsewhere, read_finished_summary

        summary = read_finished_summary(folder)
        if done.status != JobStatus.COMPLETED:
            # Another process may have begun the same job after its folder was chosen.
            taken = each.job.experiment is not None and getattr(done._return_value, "key", None) == "output_dir"
            here = find_runs(each.home, folder.name) if taken else {}
            if (same := checkpoint.identity(each.run.composed) in here) and is_held_elsewhere(folder):
                self.elsewhere += 1
                return
            summary = summary if same else None
        if summary is None:
            self.failures.append((each.job, isinstance(done._return_value, UserError)))
            return
        self._add_finished(folder, summary, each.run)
        self._there[each.home][checkpoint.identity(each.run.composed)] = folder
        if self._keeps_checkpoints(each):
            shutil.rmtree(folder / checkpoint.FOLDER, ignore_errors=True)

    def _override_job(self, each: Left, folder: Path) -> list[str]:
        """Return a job's command line, with its folder and its number of rounds between checkpoints."""
        from contrafed.config.sweep_grid import format_value

        lines = [f"hydra.sweep.dir={format_value(str(folder.parent))}", f"hydra.sweep.subdir={format_value(folder.name)}"]
        if folder == self._find_past(each) and _is_resumable(each.run):
            lines.append("resume=latest")
        if self._keeps_checkpoints(each):
            every = max(MIN_CHECKPOINT_ROUNDS, each.run.num_rounds // CHECKPOINTS)
            lines += [f"checkpoint_every={every}", "checkpoint_keep=1"]
        return [*each.job.overrides, *lines]

    @staticmethod
    def _keeps_checkpoints(each: Left) -> bool:
        return _is_resumable(each.run) and each.job.experiment is not None and each.run.checkpoint_every is None

    def _check_folders(self) -> None:
        """Raise ``UserError`` for a sweep's folder that is a run's, and for a job's numbered folder that already holds a
        run.
        """
        from contrafed.runs.output.folder import CLAIM, taken_by_a_run

        for each in self.jobs:
            own = [each.home / str(each.job.number)] if each.job.experiment is None and each.run.resume is None else []
            if (folder := next((f for f in (each.home, *own) if (f / CLAIM).exists()), None)) is not None:
                raise taken_by_a_run(folder)

    def _skip_finished(self, each: Left) -> bool:
        """Return whether a job has finished before. Its folder is then part of the report."""
        from contrafed.core.errors import UserError
        from contrafed.engines.personal_models import place_in
        from contrafed.runs.output.folder import read_finished_summary
        from contrafed.runs.setup import check_files

        there = self._find_past(each)
        if there is None or (summary := read_finished_summary(there)) is None:
            return False
        try:
            check_files(each.run, there, summary, self._fingerprints)
        except UserError as error:
            raise UserError(f"job {each.job.number}: {error}", error.key) from error
        self._add_finished(there, summary, each.run)
        if each.run.save_personal and "personal_accuracy_best" in summary and not Path(place_in(there)).exists():
            print(f"{there} finished without saving its personal models: save_personal=true needs another output_dir")
        return True

    def _find_folder(self, each: Left, chosen: Collection[Path] = ()) -> Path | None:
        """Return an existing or a new folder for a job, none of ``chosen``. None if another process has run it or runs it."""
        from contrafed.runs.output.folder import is_held_elsewhere, list_unclaimed, read_finished_summary

        there = self._find_past(each)
        if there is None and self._begins_elsewhere(each):
            print("another process begins a run of this name: waiting to see which", flush=True)
            while there is None and self._begins_elsewhere(each):
                time.sleep(POLL_SECONDS)
                there = self._find_past(each)
        if there is not None and (summary := read_finished_summary(there)) is not None:
            # Finished by another process in the meantime, or by an equal job of this sweep.
            print(f"the same run has finished in {there}", flush=True)
            self._add_finished(there, summary, each.run)
            return None
        if there is not None and is_held_elsewhere(there):
            print("another process is at it", flush=True)
            self.elsewhere += 1
            return None
        if there is not None and _is_resumable(each.run):
            return there
        folder = each.home / (str(each.job.number) if each.job.experiment is None else each.job.name)
        if self.named and each.job.experiment is None:
            return folder
        unused = (free for free in list_unclaimed(folder) if free not in chosen)
        return next(free for free in unused if not free.exists() or not is_held_elsewhere(free))

    def _add_finished(self, folder: Path, summary: dict[str, Any], run: "Run") -> None:
        self.folders.append(folder)
        self.diverged += summary.get("status") == "diverged"
        if (pace := summary.get("seconds_per_round")) is not None:
            self._paces.setdefault(_kind_of(run), []).append(float(pace))

    def _find_home(self, job: "Job", run: "Run") -> Path:
        """Return the folder of a job's sweep."""
        if self.named:
            return Path(str(self.config.hydra.sweep.dir))
        if job.experiment is not None:
            return OUTPUTS / "-".join([job.experiment, *([job.scale] if job.scale else [])])
        return self._dated_home

    @cached_property
    def _dated_home(self) -> Path:
        """The new folder of jobs without an experiment, named by the time. Runs and sweeps of the same second have others."""
        from contrafed.runs.output.folder import make_new_folder

        return make_new_folder(Path(str(self.config.hydra.sweep.dir)))

    def _find_past(self, each: Left) -> Path | None:
        """Return the folder of a job's earlier run, None if there is none."""
        from contrafed.runs.checkpoint import identity
        from contrafed.runs.output.folder import read_finished_summary
        from contrafed.runs.setup import LATEST_RUN

        wanted = identity(each.run.composed)
        if each.job.experiment is None:  # unfinished runs resume by themselves
            done = find_runs(each.home, str(each.job.number)).get(wanted) if each.run.resume == LATEST_RUN else None
            return done if done is not None and read_finished_summary(done) is not None else None
        found = self._there[each.home].get(wanted)
        # another process may have started it in the meantime
        return found or find_runs(each.home, f"{each.job.name}*").get(wanted)

    def _begins_elsewhere(self, each: Left) -> bool:
        """Return whether another process has a folder of this name without its configuration yet."""
        from contrafed.runs.output.folder import CLAIM, is_held_elsewhere

        for folder in each.home.glob(f"{each.job.name}*/") if each.job.experiment is not None else ():
            with contextlib.suppress(FileNotFoundError):
                if (folder / CLAIM).stat().st_size:
                    continue
            if folder.exists() and is_held_elsewhere(folder):  # it may have been removed in the meantime
                return True
        return False

    def _estimate_time(self, left: list[Left]) -> str:
        """Estimate the time of these runs from their rounds and the pace of their method on their data, or of all methods."""
        from contrafed.runs.setup import count_rounds_left

        every = [pace for paces in self._paces.values() for pace in paces]
        if not every:
            return ""
        rounds = {id(each): count_rounds_left(each.run, self._find_past(each)) for each in left}
        seconds = sum(rounds[id(each)] * statistics.mean(self._paces.get(_kind_of(each.run), every)) for each in left)
        hours, minutes = divmod(round(seconds / 60), 60)
        about = f"{hours} h " if hours else ""
        return f", about {about}{minutes} min to go" if hours or minutes else ", less than a minute to go"

    def _write_report(self) -> None:
        """Write a table and a figure to the sweep's folder, of its finished runs and of those of other commands."""
        from contrafed.report.pages import leave
        from contrafed.runs.output.folder import read_finished_summary

        experiments = {each.job.experiment for each in self.jobs}
        for home in dict.fromkeys(folder.parent for folder in self.folders):
            own = [folder for folder in self.folders if folder.parent == home]
            # Jobs without an experiment are numbered.
            others = find_runs(home, "[0-9]*" if experiments == {None} else "*", experiments).values()
            leave(home, list(dict.fromkeys([*own, *(path for path in others if read_finished_summary(path) is not None)])))


def _is_resumable(run: "Run") -> bool:
    # Flower gives no access to client state, and noise of the operating system must not be drawn twice.
    return run.engine.name != "flower" and getattr(run.privacy.config, "seeded_noise", True)


def _kind_of(run: "Run") -> tuple[str, str]:
    """Return method and data set, by which the times of rounds are compared."""
    return run.client.strategy.name, run.client.dataset.name


def find_runs(home: Path, pattern: str = "*", of: Any = None) -> dict[str, Path]:
    """Return the runs below a folder by the identity of their configurations. Of two equal ones the finished one is returned.

    ``of`` restricts them to these experiments. None in it stands for runs without an experiment.
    """
    import yaml

    from contrafed.runs.checkpoint import identity
    from contrafed.runs.output.folder import read_finished_summary

    found: dict[str, Path] = {}
    for path in sorted(home.glob(f"{pattern}/config.yaml")):
        try:
            config = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if isinstance(config, dict) and (of is None or config.get("experiment") in of):
            key = identity(config)
            if key not in found or read_finished_summary(found[key]) is None:
                found[key] = path.parent
    return found
