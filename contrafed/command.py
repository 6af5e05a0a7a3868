"""The command line: one run, or a sweep with ``-m``.

    python main.py strategy=pmfl participation=markovian
    python main.py -m strategy=fedavg,moon,pmfl participation=bernoulli,markovian,cyclic seed=0,1

Installed, it is the command ``contrafed`` as well. ``--help`` lists every choice. Exit status: 0 all runs finished, 1 a run
failed, 2 a mistake in what was asked for, 130 Ctrl-C.
"""

import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

import hydra
from omegaconf import DictConfig

from contrafed.config.command_line import check_jobs, help_text, read, shown
from contrafed.config.compose import as_choices, compose_job, own_folder
from contrafed.config.run_config import Run
from contrafed.core.errors import RunStopped, UserError
from contrafed.core.registry import CONF
from contrafed.core.stdio import outliving
from contrafed.runs.output import print_summary, quiet_libraries, versions
from contrafed.runs.output.folder import held
from contrafed.runs.setup import check_latest, names_folder
from contrafed.runs.sweep import Sweep, expand, part, take_shard

INTERRUPTED = 130  # exit status after Ctrl-C


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def show(_: DictConfig) -> None:
    """Let Hydra show what ``--info`` asks for; runs nothing."""


def main() -> int:
    """Check every job, run them, and return the exit status."""
    try:
        arguments, shard = take_shard(as_choices(sys.argv[1:]))
        asked = read(arguments)
        if asked.version:
            print(f"contrafed {versions()['contrafed']}")
            return 0
        if asked.help:
            print(help_text(asked.config_dir))
            return 0
        own, overrides = own_folder(asked.config_dir), asked.overrides
        quiet_libraries("verbose=true" in (o.lower() for o in overrides))
        # A polite kill ends a run as Ctrl-C does: with everything so far written.
        signal.signal(signal.SIGTERM, _interrupt)
        if asked.cfg and not asked.info:
            print(shown(compose_job(overrides, own), asked.package, asked.resolve), end="")
            return 0
        runs = check_jobs(overrides, asked.multirun, own)
        if asked.info:
            sys.argv[1:] = [*overrides, f"--info={asked.info}", *(() if own is None else (f"--config-dir={own}",))]
            show()
            return 0
        named = names_folder(overrides)
        ours = asked.multirun and any(o.startswith("experiment=") for o in overrides)  # a sweep in the experiment's own folder
        check_latest(runs[0], named or ours)
        if not asked.multirun:
            if (several := len(expand(overrides, own))) > 1:
                print(f"this is one of {several} jobs: this line with -m runs them all", flush=True)
            return run_one(runs[0], unique=not named)
        sweep = Sweep(part(expand(overrides, own), runs, shard), named)
        sweep.run()
        return sweep.status()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was finished, if anything, is in the run's folder", file=sys.stderr)
        return INTERRUPTED
    finally:
        if (ray := sys.modules.get("contrafed.engines.ray")) is not None:
            ray.stop_ray()


def run_one(run: Run, unique: bool) -> int:
    """Run one job and return the exit status. Raises ``UserError``."""
    from contrafed.runs.run import run_resolved

    try:
        with held(Path(run.output_dir)) as free:
            if not free and not unique:
                raise UserError(f"output_dir: another process writes in {run.output_dir}")
            summary = run_resolved(run, unique=unique)
    except UserError:
        raise
    except RunStopped as stopped:
        print(f"error: {stopped}", file=sys.stderr, flush=True)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    print_summary(summary, summary["folder"])
    return 0


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
