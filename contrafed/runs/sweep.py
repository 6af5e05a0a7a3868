"""A sweep: its jobs by an experiment's grid and the command line, and their runs one after another.

    python main.py -m experiment=pmfl/table1                            the whole grid, in outputs/pmfl/table1
    python main.py -m experiment=pmfl/table1 strategy=pmfl seed=0,1     a part of it, and a second seed
    python main.py -m experiment=pmfl/table1 shard=2/4                  every fourth job, from the second

What the folder of an experiment's sweep holds, known by its configuration, is not run again, or goes on where it stopped: its
jobs keep checkpoints until they are finished.
"""

import contextlib
import itertools
import re
import shutil
import statistics
import sys
import time
import traceback
import zlib
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from contrafed.config import grid
from contrafed.config.compose import CHOICE_GROUPS, as_choices, choice_key, grid_of, own_folder
from contrafed.config.run_config import Run
from contrafed.config.yamls import choices_of, parse
from contrafed.core.errors import RunStopped, UserError
from contrafed.runs.output.folder import CLAIM, finished, held, make_folder, numbered, taken, taken_by_a_run
from contrafed.runs.setup import LATEST

OUTPUTS = Path("outputs")
POLL = 0.5  # seconds between two looks at what another process does
CHECKPOINTS = 20  # that an experiment's job writes unless it is told how often
LEAST_BETWEEN = 10  # rounds
LONGEST = 150  # characters of a job's name, which is a folder's
NAMED = 5  # jobs that the last line names, of those that failed


@dataclass(frozen=True)
class Job:
    """One job of a sweep."""

    number: int  # from 0, whatever part of the sweep is run
    overrides: list[str]  # a command line of its own
    name: str  # what it varies
    experiment: str | None
    home: Path | None  # the folder of the experiment's sweep


def expand(overrides: list[str], config_dir: str | Path | None = None) -> list[Job]:
    """Return every job of a sweep: a grid's axes first, then the command line's own. Raises ``UserError``.

    An override of an axis replaces its values, one of a choice that named cases make narrows them, and any other with several
    values is one more axis.
    """
    own = own_folder(config_dir)
    asked = dict(_values(override) for override in parse(as_choices(overrides)))
    jobs: list[Job] = []
    for chosen in asked.pop("experiment", {"": ""}).values():
        experiment = None if chosen in ("", "experiment=null") else chosen.partition("=")[2]
        axes, used, bare = dict[str, list[str]](), set[str](), set(CHOICE_GROUPS)
        if experiment is not None:
            table = {choice_key(name): axis for name, axis in grid_of(experiment, own).items()}
            axes, used = grid.axes_of(
                table, {key: list(values) for key, values in asked.items()}, CHOICE_GROUPS, choices_of(experiment, own)
            )
            bare |= {name for name, axis in table.items() if isinstance(axis, dict)}
        columns = {key: {value: f"{key}={value}" for value in values} for key, values in axes.items()}
        columns |= {key: values for key, values in asked.items() if key not in used}
        varied = [key for key, values in columns.items() if key in axes or len(values) > 1]
        for row in itertools.product(*columns.values()):
            values = dict(zip(columns, row, strict=True))
            lines = [columns[key][value] for key, value in values.items()]
            name = "-".join(_part(key, values[key], key in bare) for key in varied) or "run"
            name = name if len(name) <= LONGEST else f"{name[:LONGEST]}-{zlib.crc32(name.encode()):08x}"
            home = None if experiment is None else OUTPUTS / "-".join([experiment, *_scale(values.get("scale"))])
            jobs.append(Job(len(jobs), [chosen, *lines] if chosen else lines, name, experiment, home))
    return jobs


def _values(override: Override) -> tuple[str, dict[str, str]]:
    """Return an override's key, and its values' texts with the override of each."""
    if not override.is_sweep_override():
        line = str(override.input_line)
        return override.key_or_group, {line.partition("=")[2]: line}
    key = override.get_key_element()
    try:
        if getattr(override.value(), "shuffle", False):  # in another order at every look
            raise HydraException
        return override.key_or_group, {value: f"{key}={value}" for value in map(str, override.sweep_string_iterator())}
    except HydraException as error:
        raise UserError(f"{override.input_line} cannot be listed here: write the values out, as {key}=a,b,c") from error


def _part(key: str, value: str, bare: bool) -> str:
    """Return an axis's part of a job's name: a choice or a case by itself, another value behind its key's last word."""
    word = re.sub(r"[^\w.+-]+", "_", value).strip("_")
    return word if bare else f"{re.split('[./]', key)[-1]}={word}"


def _scale(value: str | None) -> list[str]:
    return [] if value in (None, "null") else [str(value)]


def take_shard(arguments: list[str]) -> tuple[list[str], tuple[int, int]]:
    """Return the arguments without ``shard=I/N``, and (I, N), by default (1, 1). Raises ``UserError`` for other forms."""
    rest = [a for a in arguments if not a.startswith("shard=")]
    shard = (1, 1)
    for argument in arguments:
        if argument.startswith("shard="):
            found = re.fullmatch(r"shard=(\d+)/(\d+)", argument)
            shard = (int(found[1]), int(found[2])) if found else (0, 0)
            if not 1 <= shard[0] <= shard[1]:
                raise UserError(f"{argument} must be I/N with I from 1 to N, such as shard=2/4")
            if not {"-m", "--multirun"} & set(arguments):
                raise UserError(f"{argument} is for a sweep: add -m")
    return rest, shard


def part(jobs: list[Job], runs: list[Run], shard: tuple[int, int]) -> list[tuple[Job, Run]]:
    """Return the jobs of a shard (I, N): every Nth from the Ith. Raises ``UserError`` where there is none."""
    chosen = list(zip(jobs, runs, strict=True))[shard[0] - 1 :: shard[1]]
    if not chosen:
        raise UserError(f"shard={shard[0]}/{shard[1]}: the sweep has only {len(jobs)} jobs")
    return chosen


@dataclass
class Sweep:
    """The jobs that one command line runs, and what became of them."""

    jobs: list[tuple[Job, Run]]
    named: bool = False  # whether the command line names the folder
    failures: list[tuple[Job, bool]] = field(default_factory=list)  # and whether by a mistake in what was asked for
    elsewhere: int = 0  # jobs that another process was at
    folders: list[Path] = field(default_factory=list)  # of the finished runs, in the order of the jobs
    _paces: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # (method, data set) -> seconds a round
    _there: dict[Path, dict[str, Path]] = field(default_factory=dict)  # what each folder held: identity -> run

    def run(self) -> None:
        """Run what is left. A job that fails is reported and the others go on; Ctrl-C ends the sweep. Raises ``UserError``."""
        from contrafed.engines.personal_models import place_in

        left = []
        self._check_folders()
        for job, run in self.jobs:
            home = self._home(job, run)
            make_folder(home)
            if home not in self._there:
                self._there[home] = runs_in(home) if job.experiment is not None else {}
            there = self._past(job, run)
            if there is not None and (summary := finished(there)) is not None:
                self._done(there, summary, run)
                if run.save_personal and "personal_accuracy_best" in summary and not Path(place_in(there)).exists():
                    print(f"{there} finished without saving its personal models: save_personal=true needs another output_dir")
            else:
                left.append((job, run, _rounds_left(run, there)))
        what = "" if not self.folders else f", {len(self.folders)} of them finished already"
        print(f"{len(self.jobs)} jobs{what}: {len(left)} to run in {self._home(*self.jobs[0])}", flush=True)
        _check_data([run for _, run, _ in left])
        try:
            for number, (job, run, _) in enumerate(left):
                to_go = self._to_go([(run, rounds) for _, run, rounds in left[number:]])
                print(f"\n[job {job.number}, {len(left) - number} left{to_go}] {' '.join(job.overrides)}", flush=True)
                self._run(job, run)
            if len(self.jobs) > 1:
                counts = {"failed": len(self.failures), "left to another process": self.elsewhere}
                ends = ", ".join(f"{count} {what}" for what, count in counts.items() if count or what == "failed")
                print(f"\n{len(self.folders)} of {len(self.jobs)} jobs finished, {ends}", flush=True)
        finally:  # also of a sweep that is stopped
            self._leave()

    def _check_folders(self) -> None:
        """Raise ``UserError`` for a folder that is a run's own, and for a numbered one that a job would find taken."""
        for job, run in self.jobs:
            home = self._home(job, run)
            own = [home / str(job.number)] if job.experiment is None and run.resume is None else []
            if (folder := next((f for f in (home, *own) if (f / CLAIM).exists()), None)) is not None:
                raise taken_by_a_run(folder)

    def status(self) -> int:
        """Return the exit status, having named the jobs that failed."""
        if self.failures:
            names = [" ".join(job.overrides) for job, _ in self.failures[:NAMED]]
            more = [f"and {len(self.failures) - NAMED} more"] if len(self.failures) > NAMED else []
            print(f"error: {len(self.failures)} job(s) failed: {'; '.join([*names, *more])}", file=sys.stderr)
        return (2 if all(mistake for _, mistake in self.failures) else 1) if self.failures else 0

    def _leave(self) -> None:
        """Leave a table and a figure in the sweep's folder: of its finished runs, and of what other commands ran of it."""
        from contrafed.report.pages import leave

        experiments = {job.experiment for job, _ in self.jobs}
        for home in dict.fromkeys(folder.parent for folder in self.folders):
            own = [folder for folder in self.folders if folder.parent == home]
            # Jobs of no experiment are numbered.
            theirs = runs_in(home, "[0-9]*" if experiments == {None} else "*", experiments).values()
            leave(home, list(dict.fromkeys([*own, *(path for path in theirs if finished(path) is not None)])))

    def _run(self, job: Job, run: Run) -> None:
        from contrafed.runs import checkpoint
        from contrafed.runs.output import print_summary
        from contrafed.runs.run import run as run_one

        there = self._past(job, run)
        if there is None and self._begins_elsewhere(job, run):
            print("another process begins a run of this name: waiting to see which", flush=True)
            while there is None and self._begins_elsewhere(job, run):
                time.sleep(POLL)
                there = self._past(job, run)
        if there is not None and (summary := finished(there)) is not None:
            # By another process meanwhile, or by a job whose case the command line leaves nothing of its own.
            print(f"the same run has finished in {there}", flush=True)
            return self._done(there, summary, run)
        # Flower keeps what nodes remember to itself, and secret noise must not be drawn twice.
        resumable = run.engine.name != "flower" and getattr(run.privacy.config, "noise", None) != "secret"
        if there is not None and taken(there):
            print("another process is at it", flush=True)
            self.elsewhere += 1
            return None
        folder = there if there is not None and resumable else self._free(job, run)
        config: dict[str, Any] = {**run.composed, "output_dir": str(folder)} | ({"resume": "latest"} if folder == there else {})
        keeps = resumable and job.experiment is not None and run.checkpoint_every is None
        if keeps:
            config |= {"checkpoint_every": max(LEAST_BETWEEN, run.num_rounds // CHECKPOINTS), "checkpoint_keep": 1}
        try:
            with held(folder) as free:
                if not free and self.named and job.experiment is None:
                    raise UserError(f"output_dir: another process writes in {folder}")
                if not free:  # it came between: look again
                    return self._run(job, run)
                summary = run_one(config, unique=job.experiment is not None or not self.named)
        except UserError as error:
            self.failures.append((job, True))
            print(f"error: {error}", file=sys.stderr, flush=True)
        except RunStopped as stopped:
            self.failures.append((job, False))
            print(f"error: {stopped}", file=sys.stderr, flush=True)
        except Exception:
            self.failures.append((job, False))
            traceback.print_exc()
        else:
            print_summary(summary, summary["folder"])
            self._done(Path(summary["folder"]), summary, run)
            self._there[self._home(job, run)][checkpoint.identity(run.composed)] = self.folders[-1]
            if keeps:
                shutil.rmtree(self.folders[-1] / checkpoint.FOLDER, ignore_errors=True)
        return None

    def _free(self, job: Job, run: Run) -> Path:
        """Return a folder for a run of its own: one that no run has, or the number in a folder that the command line names."""
        folder = self._home(job, run) / (str(job.number) if job.experiment is None else job.name)
        if self.named and job.experiment is None:
            return folder
        return next(free for free in _unclaimed(folder) if not free.exists() or not taken(free))

    def _done(self, folder: Path, summary: dict[str, Any], run: Run) -> None:
        self.folders.append(folder)
        if (pace := summary.get("seconds_per_round")) is not None:
            self._paces.setdefault(_kind(run), []).append(float(pace))

    def _home(self, job: Job, run: Run) -> Path:
        """Return the folder of a job's sweep."""
        if self.named:
            return Path(run.output_dir)
        return job.home or self._dated

    @cached_property
    def _dated(self) -> Path:
        """The folder of jobs of no experiment, by the time of the first: another than a run's of the same second."""
        return next(_unclaimed(Path(self.jobs[0][1].output_dir)))

    def _past(self, job: Job, run: Run) -> Path | None:
        """Return the folder of the run that a job had before, None where there is none."""
        from contrafed.runs.checkpoint import identity

        home, wanted = self._home(job, run), identity(run.composed)
        if job.experiment is None:  # what has not finished goes on by itself
            done = runs_in(home, str(job.number)).get(wanted) if run.resume == LATEST else None
            return done if done is not None and finished(done) is not None else None
        found = self._there[home].get(wanted)
        return found or runs_in(home, f"{job.name}*").get(wanted)  # another process may have begun it meanwhile

    def _begins_elsewhere(self, job: Job, run: Run) -> bool:
        """Whether another process has a folder of this name of which it has not said yet what it runs there."""
        for folder in self._home(job, run).glob(f"{job.name}*/") if job.experiment is not None else ():
            with contextlib.suppress(FileNotFoundError):
                if (folder / CLAIM).stat().st_size:
                    continue
            if folder.exists() and taken(folder):  # it may have been given up meanwhile
                return True
        return False

    def _to_go(self, left: list[tuple[Run, int]]) -> str:
        """Return about how long these runs take: their rounds by the pace of their method on their data, or of all."""
        every = [pace for paces in self._paces.values() for pace in paces]
        if not every:
            return ""
        seconds = sum(rounds * statistics.mean(self._paces.get(_kind(run), every)) for run, rounds in left)
        hours, minutes = divmod(round(seconds / 60), 60)
        about = f"{hours} h " if hours else ""
        return f", about {about}{minutes} min to go" if hours or minutes else ", less than a minute to go"


def _check_data(left: list[Run]) -> None:
    """Load, or download, what several runs train on: what is missing is said once, before the first. Raises ``UserError``."""
    from contrafed.data.images import load_images

    if len(left) > 1:
        for dataset in {repr((run.node.dataset.name, run.node.dataset.config)): run.node.dataset for run in left}.values():
            load_images(dataset)


def _unclaimed(path: Path) -> Iterator[Path]:
    """Return the folders of this name, and of its numbers, that no run has."""
    return (folder for folder in map(path.with_name, numbered(path.name)) if not (folder / CLAIM).exists())


def _rounds_left(run: Run, there: Path | None) -> int:
    """Return the rounds after the last checkpoint of the run that a job had before."""
    from contrafed.runs import checkpoint

    done = checkpoint.numbered(there / checkpoint.FOLDER) if there is not None else []
    return run.num_rounds - (int(done[-1].name) if done else 0)


def _kind(run: Run) -> tuple[str, str]:
    """Return what runs of like rounds have in common: method and data set."""
    return run.node.strategy.name, run.node.dataset.name


def runs_in(home: Path, pattern: str = "*", of: Container[str | None] | None = None) -> dict[str, Path]:
    """Return the runs below a folder by what identifies their configuration; of two alike the finished one.

    ``of``: those of these experiments alone, None among them for runs of none.
    """
    from contrafed.runs.checkpoint import identity

    found: dict[str, Path] = {}
    for path in sorted(home.glob(f"{pattern}/config.yaml")):
        try:
            config = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if isinstance(config, dict) and (of is None or config.get("experiment") in of):
            key = identity(config)
            if key not in found or finished(found[key]) is None:
                found[key] = path.parent
    return found
