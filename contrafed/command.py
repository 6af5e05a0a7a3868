"""The command line: one run, or a sweep with ``-m``.

    python main.py strategy=pmfl participation=markovian
    python main.py -m strategy=fedavg,moon,pmfl participation=bernoulli,markovian,cyclic seed=0,1

It is a ``@hydra.main`` program with all of Hydra's options, launchers and sweepers. Installed, it is the command ``contrafed``
as well. ``--help`` lists every choice. Exit status: 0 all runs finished, 1 a run failed, 2 a mistake in what was asked for, 130
Ctrl-C.
"""

import contextlib
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
import hydra._internal.hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from contrafed.config.command_line import check_arguments, help_text, order_arguments, read_arguments
from contrafed.config.compose import expand_jobs
from contrafed.config.loader import ConfigLoader
from contrafed.config.overrides import one_line
from contrafed.core.errors import RunStopped, UserError
from contrafed.core.registry import CONF
from contrafed.core.stdio import outliving
from contrafed.runs.output import quiet_libraries, versions

INTERRUPTED = 130  # exit status after Ctrl-C


def run_job(config: DictConfig) -> float | None:
    """Run one job of Hydra's and return its objective. In a sweep it raises what ends the job, else it ends the process."""
    try:
        return train(config)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        status = report_error(error)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise
        raise SystemExit(status) from None


def train(config: DictConfig) -> float | None:
    """Run a composed configuration in the folder that Hydra names. Raises ``UserError`` and ``RunStopped``."""
    from contrafed.runs.launch import run_in_folder

    job = HydraConfig.get()
    quiet_libraries(config.verbose)
    overrides = [str(line) for line in job.overrides.task]
    if job.mode == RunMode.MULTIRUN:
        return run_in_folder(config, Path(os.path.relpath(job.runtime.output_dir)), named=True, unique=False)
    named = any(line.lstrip("+").startswith("output_dir=") for line in overrides) or any(
        str(line).startswith("hydra.run.dir=") for line in job.overrides.hydra
    )
    if (several := len(expand_jobs(overrides, next(_config_dirs(job), None)))) > 1:
        print(f"this is one of {several} jobs: this line with -m runs them all", flush=True)
    return run_in_folder(config, Path(config.output_dir), named=named, unique=not named)


def _config_dirs(job: Any) -> Any:
    return (source.path for source in job.runtime.config_sources if source.provider == "command-line")


def report_error(error: BaseException) -> int:
    """Print what ended a job, a mistake or a stop in one line, and return its exit status."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, UserError | RunStopped | HydraException):
        print(f"error: {one_line(error) if isinstance(error, HydraException) else error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    error.__dict__["reported"] = True
    return 2 if isinstance(error, UserError | HydraException) else 1


def main() -> int:
    """Do what the command line asks for, and return the exit status."""
    arguments = sys.argv[1:]
    try:
        if "--version" in arguments:
            print(f"contrafed {versions()['contrafed']}")
            return 0
        asked = read_arguments(arguments)
        if asked.help:
            print(help_text(asked.config_dir))
            return 0
        # A polite kill ends a run as Ctrl-C does: with everything so far written.
        signal.signal(signal.SIGTERM, _interrupt)
        if not (asked.hydra_help or asked.shell_completion):
            check_arguments(asked)
        return start_hydra(order_arguments(arguments, asked))
    except KeyboardInterrupt:
        print("interrupted: what was finished, if anything, is in the run's folder", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception as error:
        return 1 if "reported" in error.__dict__ and not isinstance(error, UserError) else report_error(error)
    finally:
        if (ray := sys.modules.get("contrafed.engines.ray")) is not None:
            ray.stop_ray()


def start_hydra(arguments: list[str]) -> int:
    """Hand a checked command line to Hydra. Raises what a job of a foreign sweeper raised."""
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
    """Have Hydra raise errors, which are reported here in one line, and not print them."""
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
    if status == INTERRUPTED:
        # A thread of Flower's runtime may wait for ever on a worker that Ctrl-C ended; everything is written by now.
        os._exit(status)
    sys.exit(status)
