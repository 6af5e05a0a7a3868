"""The command line: one run, or a sweep with ``-m``.

    python main.py strategy=pmfl participation=markovian
    python main.py -m strategy=fedavg,moon,pmfl participation=bernoulli,markovian,cyclic seed=0,1

Installed, it is the command ``contrafed`` as well. ``--help`` lists every choice. Exit status: 0 all runs finished, 1 a run
failed, 2 a mistake in what was asked for, 130 Ctrl-C.
"""

import contextlib
import os
import signal
import sys
import traceback
from itertools import pairwise
from pathlib import Path
from types import FrameType

import hydra
from omegaconf import DictConfig, OmegaConf

from contrafed.cli import check_jobs, help_text, take_config_dir
from contrafed.composition import as_choices, compose_job, own_folder
from contrafed.reporting import print_summary, quiet_libraries
from contrafed.reporting.folder import held
from contrafed.settings import Run
from contrafed.sweep import Sweep, expand, part, take_shard
from core.errors import RunStopped, UserError

INTERRUPTED = 130  # exit status after Ctrl-C

# Hydra's flags that take a value; they show something and run nothing.
HYDRA_FLAGS = frozenset({"--cfg", "-c", "--info", "-i", "--package", "-p"})
HYDRA_FLAGS_WITH_SIGN = tuple(f"{flag}=" for flag in HYDRA_FLAGS)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def show(_: DictConfig) -> None:
    """Let Hydra show what one of its own flags asks for; runs nothing."""


def main() -> int:
    """Check every job, run them, and return the exit status."""
    try:
        arguments, folder = take_config_dir(as_choices(sys.argv[1:]))
        arguments, shard = take_shard(arguments)
        if any(a in ("-h", "--help") for a in arguments):
            with contextlib.suppress(BrokenPipeError):  # somebody reads only the first lines
                print(help_text(folder), flush=True)
            return 0
        for argument in arguments:
            if argument.startswith("-") and "=" in argument and not argument.startswith(HYDRA_FLAGS_WITH_SIGN):
                raise UserError(f"{argument}: keys have no dashes, write {argument.lstrip('-')}")
        own = own_folder(folder)
        # What follows one of Hydra's own flags, as in "--cfg job", is no override.
        overrides = [a for before, a in pairwise(["", *arguments]) if not a.startswith("-") and before not in HYDRA_FLAGS]
        multirun = any(a in ("-m", "--multirun") for a in arguments)
        quiet_libraries("verbose=true" in (o.lower() for o in overrides))
        # A polite kill ends a run as Ctrl-C does: with everything so far written.
        signal.signal(signal.SIGTERM, _interrupt)
        if not multirun and _shows_a_job([a for a in arguments if a not in overrides]):
            print(OmegaConf.to_yaml(compose_job(overrides, own)), end="")
            return 0
        runs = check_jobs(overrides, multirun, own)
        if multirun and set(arguments) & HYDRA_FLAGS:
            raise UserError("-m runs jobs, and --cfg, --info and --package only show one: leave one of them out")
        if set(arguments) - set(overrides) - {"-m", "--multirun"}:
            sys.argv[1:] = [*arguments, *(() if own is None else ("--config-dir", str(own)))]
            show()
            return 0
        named = any(o.startswith("output_dir=") for o in overrides)
        if not multirun:
            if (several := len(expand(overrides, own))) > 1:
                print(f"this is one of the {several} jobs of its experiment; -m runs them all", flush=True)
            return run_one(runs[0], unique=not named)
        sweep = Sweep(part(expand(overrides, own), runs, shard), named)
        sweep.run()
        return sweep.status()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was finished is in the run's folder", file=sys.stderr)
        return INTERRUPTED
    finally:
        if (ray := sys.modules.get("simulation.ray")) is not None:
            ray.stop_ray()


def _shows_a_job(flags: list[str]) -> bool:
    """Whether the flags among the arguments are ``--cfg job`` and no other."""
    return flags in (["--cfg", "job"], ["-c", "job"], ["--cfg=job"])


def run_one(run: Run, unique: bool) -> int:
    """Run one job and return the exit status. Raises ``UserError``."""
    from contrafed.experiment import run as run_experiment

    try:
        with held(Path(run.output_dir)) as free:
            if not free and not unique:
                raise UserError(f"output_dir: another process writes in {run.output_dir}")
            summary = run_experiment(run.composed, unique=unique)
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
    status = main()
    if status == INTERRUPTED:
        # A thread of Flower's runtime may wait for ever on a worker that Ctrl-C ended; everything is written by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    command()
