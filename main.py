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
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from contrafed.cli import check_jobs, help_text, take_config_dir
from contrafed.composition import as_choices, compose_job, own_folder
from contrafed.reporting import print_summary, quiet_libraries
from core.errors import RunStopped, UserError

INTERRUPTED = 130  # exit status after Ctrl-C

# Hydra's flags that take a value; they show something and run nothing.
HYDRA_FLAGS = frozenset({"--cfg", "-c", "--info", "-i", "--package", "-p"})

# Jobs that failed, and whether by a mistake in what was asked for.
failed: list[tuple[str, bool]] = []

# The user's own folder of YAMLs.
config_dir: Path | None = None


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def job(_: DictConfig) -> None:
    """Run one job, composed anew since Hydra knows nothing of an experiment's ``methods``.

    A failing job is reported and the sweep goes on; Ctrl-C ends it.
    """
    from contrafed.experiment import run

    hydra_config = HydraConfig.get()
    sweeping = hydra_config.mode == RunMode.MULTIRUN
    name = " ".join(hydra_config.overrides.task)
    if sweeping:
        print(f"\n[job {hydra_config.job.num}] {name}", flush=True)
    named_by_user = any(o.startswith("output_dir=") for o in hydra_config.overrides.task)
    output_dir = hydra_config.runtime.output_dir
    try:
        cfg = compose_job(list(hydra_config.overrides.task), config_dir)
        cfg.output_dir = output_dir
        summary = run(cfg, unique=not named_by_user)
    except UserError as error:
        failed.append((name, True))
        with contextlib.suppress(OSError):  # Hydra made the folder; nothing is in it
            Path(output_dir).rmdir()
        print(f"error: {error}", file=sys.stderr, flush=True)
    except RunStopped as stopped:
        failed.append((name, False))
        print(f"error: {stopped}", file=sys.stderr, flush=True)
    except Exception:
        failed.append((name, False))
        traceback.print_exc()
    else:
        print_summary(summary, summary["folder"])


def main() -> int:
    """Check every job, run them, and return the exit status."""
    global config_dir
    made: list[Path] = []
    try:
        arguments, folder = take_config_dir(as_choices(sys.argv[1:]))
        if any(a in ("-h", "--help") for a in arguments):
            with contextlib.suppress(BrokenPipeError):  # somebody reads only the first lines
                print(help_text(folder), flush=True)
            return 0
        config_dir = own_folder(folder)
        sys.argv[1:] = [*arguments, *(() if config_dir is None else ("--config-dir", str(config_dir)))]
        # What follows one of Hydra's own flags, as in "--cfg job", is no override.
        overrides = [a for before, a in pairwise(["", *arguments]) if not a.startswith("-") and before not in HYDRA_FLAGS]
        multirun = any(a in ("-m", "--multirun") for a in arguments)
        quiet_libraries("verbose=true" in (o.lower() for o in overrides))
        # A polite kill ends a run as Ctrl-C does: with everything so far written.
        signal.signal(signal.SIGTERM, _interrupt)
        if not multirun and arguments[-2:] in (["--cfg", "job"], ["-c", "job"]):
            print(OmegaConf.to_yaml(compose_job(overrides, config_dir)), end="")
            return 0
        for run in check_jobs(overrides, multirun, config_dir):
            if not HYDRA_FLAGS.intersection(arguments):
                made += make_folder(Path(run.output_dir))
        job()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was finished is in the run's folder", file=sys.stderr)
        return INTERRUPTED
    finally:
        if (ray := sys.modules.get("simulation.ray")) is not None:
            ray.stop_ray()
        for folder_made in made:  # Hydra names a run's folder anew, and by then a second may have passed
            with contextlib.suppress(OSError):
                folder_made.rmdir()
    if failed and multirun:
        print(f"error: {len(failed)} job(s) failed: {'; '.join(name for name, _ in failed)}", file=sys.stderr)
    return (2 if all(mistake for _, mistake in failed) else 1) if failed else 0


def make_folder(folder: Path) -> list[Path]:
    """Create a run's folder before Hydra would, whose complaint is a traceback; returns it if it is new."""
    try:
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output_dir: cannot write to {folder} ({error.strerror})") from error
    return [folder] if new else []


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
