"""Run the command line: one run, or a sweep with ``-m``.

    python main.py strategy=pmfl participation=markovian
    python main.py -m strategy=fedavg,moon,pmfl participation=bernoulli,markovian,cyclic seed=0,1
    python main.py check strategy=NAME --config-dir=FOLDER         test an own method, network or data set

It is a ``@hydra.main`` program with all of Hydra's options, launchers and sweepers. An installation also has the command
``contrafed``. ``--help`` lists every choice. Exit status: 0 if all runs finished, 1 if a run failed, 2 for a wrong command line
or configuration, 130 after Ctrl-C.
"""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
import hydra._internal.hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from contrafed.check.command import check_command
from contrafed.config.command_line import check_arguments, help_text, order_arguments, read_arguments
from contrafed.config.loader import ConfigLoader, to_plain
from contrafed.config.overrides import one_line
from contrafed.config.run_config import resolve
from contrafed.core.errors import RunStopped, UserError
from contrafed.core.registry import CONF
from contrafed.core.stdio import outliving
from contrafed.runs.launch import (
    check_objective,
    find_folder,
    find_named_folder,
    note_missing,
    print_other_jobs,
    print_unused,
    read_objective,
    remove_empty,
    warn_of_objective,
)
from contrafed.runs.output import print_summary, quiet_libraries, versions
from contrafed.runs.output.folder import held_by_another, hold_folder
from contrafed.runs.setup import check_latest

TAKE_VALUES = ("--config-dir", "-cd")  # options whose value may be an own argument
INTERRUPTED_STATUS = 130  # exit status after Ctrl-C


def run_job(config: DictConfig) -> float | None:
    """Run one Hydra job in the folder that Hydra names.

    In a sweep it raises the error that ends the job. A single run ends the process instead.

    Args:
        config: The composed configuration.

    Returns:
        The objective, or None if the run has no such number.
    """
    with _end_job():
        quiet_libraries(config.verbose)  # before they are imported
        from contrafed.runs.run import run_resolved

        folder, named = find_folder(config)
        config.output_dir = str(folder)
        print_other_jobs()
        try:
            run = resolve(to_plain(config))
            check_latest(run, named)
            check_objective(run)
            print_unused(run)
            with hold_folder(folder) as free:
                if not free and named:
                    raise held_by_another(folder)
                summary = run_resolved(run, unique=not named)
        finally:
            remove_empty(folder)
        print_summary(summary, summary["folder"])
        reached = read_objective(summary, run.objective)
        if notice := warn_of_objective(summary, run.objective):
            print(notice, flush=True)
        return reached


@contextlib.contextmanager
def _end_job() -> Iterator[None]:
    """Report what ends a job, and end the process with its exit status unless the job is one of a sweep."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        status = report_error(error)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise
        raise SystemExit(status) from None


def report_error(error: BaseException) -> int:
    """Print the error that ended a job, and return its exit status.

    A user's mistake or a stopped run takes one line. Any other error is printed with its traceback.
    """
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, UserError | RunStopped | HydraException):
        print(f"error: {one_line(error) if isinstance(error, HydraException) else error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    error.__dict__["reported"] = True
    return 2 if isinstance(error, UserError | HydraException) else 1


def main() -> int:
    """Run what the command line asks for, and return the exit status."""
    arguments = sys.argv[1:]
    try:
        if "--version" in arguments:
            print(f"contrafed {versions()['contrafed']}")
            return 0
        if "check" in arguments and ["", *arguments][arguments.index("check")] not in TAKE_VALUES:
            quiet_libraries(False)
            arguments.remove("check")
            return check_command(arguments)
        asked = read_arguments(arguments)
        if asked.help:
            print(help_text(asked.config_dir))
            return 0
        # SIGTERM ends a run as Ctrl-C does: everything written so far is kept.
        signal.signal(signal.SIGTERM, _interrupt)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: the terminal may be closed
            signal.signal(signal.SIGHUP, _interrupt)
        run = {} if asked.hydra_help or asked.shell_completion else check_arguments(asked)
        note_missing(find_named_folder(asked.overrides) or Path(run.get("output_dir", ".")))
        return start_hydra(order_arguments(arguments, asked))
    except KeyboardInterrupt:
        print("interrupted: what was finished, if anything, is in the run's folder", file=sys.stderr)
        return INTERRUPTED_STATUS
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception as error:
        return 1 if "reported" in error.__dict__ and not isinstance(error, UserError) else report_error(error)
    finally:
        if (ray := sys.modules.get("contrafed.engines.ray")) is not None:
            ray.stop_ray()


def start_hydra(arguments: list[str]) -> int:
    """Start Hydra with a checked command line.

    Raises:
        Exception: The error of a job, if the sweeper is not Contrafed's.
    """
    hydra._internal.hydra.ConfigLoaderImpl = ConfigLoader  # type: ignore[misc]
    before, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        with _full_errors():
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run_job)()
    finally:
        sys.argv = before
    return 0


@contextlib.contextmanager
def _full_errors() -> Any:
    """Make Hydra raise errors instead of printing them, so that they are reported here in one line."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def command() -> None:
    """Run ``main`` and end the process with its status: the console script ``contrafed``."""
    with outliving():
        status = main()
    if status == INTERRUPTED_STATUS:
        # A thread of Flower's runtime may wait for ever for a worker that Ctrl-C ended. Everything is written by now.
        os._exit(status)
    sys.exit(status)
