"""The command line: one run, or a sweep with ``-m``.

    python main.py strategy=pmfl participation=markovian
    python main.py -m strategy=fedavg,moon,pmfl participation=bernoulli,markovian,cyclic seed=0,1

``--help`` lists every choice. Exit status: 0 all runs finished, 1 a run failed, 2 a mistake in what was asked for, 130 Ctrl-C.
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
from omegaconf import DictConfig

from contrafed.cli import as_choices, check_jobs, help_text
from contrafed.reporting import print_summary, quiet_libraries
from core.errors import UserError

INTERRUPTED = 130  # exit status after Ctrl-C

# Hydra's flags that take a value.
HYDRA_FLAGS = frozenset({"--cfg", "-c", "--info", "-i", "--package", "-p", "--config-dir", "-cd"})

# Jobs that failed, and whether by a mistake in what was asked for.
failed: list[tuple[str, bool]] = []


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def job(cfg: DictConfig) -> None:
    """Run one job. A failing job is reported and the sweep goes on; Ctrl-C ends it."""
    from contrafed.experiment import run

    hydra_config = HydraConfig.get()
    sweeping = hydra_config.mode == RunMode.MULTIRUN
    name = " ".join(hydra_config.overrides.task)
    if sweeping:
        print(f"\n[job {hydra_config.job.num}] {name}", flush=True)
    named_by_user = any(o.startswith("output_dir=") for o in hydra_config.overrides.task)
    cfg.output_dir = hydra_config.runtime.output_dir
    try:
        summary = run(cfg, unique=not named_by_user)
    except UserError as error:
        failed.append((name, True))
        with contextlib.suppress(OSError):  # Hydra made the folder; nothing is in it
            Path(cfg.output_dir).rmdir()
        print(f"error: {error}", file=sys.stderr, flush=True)
    except Exception:
        failed.append((name, False))
        traceback.print_exc()
    else:
        print_summary(summary, summary["folder"])


def main() -> int:
    """Check every job, run them, and return the exit status."""
    arguments = sys.argv[1:] = as_choices(sys.argv[1:])
    if any(a in ("-h", "--help") for a in arguments):
        with contextlib.suppress(BrokenPipeError):  # somebody reads only the first lines
            print(help_text(), flush=True)
        return 0
    # What follows one of Hydra's own flags, as in "--cfg job", is no override.
    overrides = [a for before, a in pairwise(["", *arguments]) if not a.startswith("-") and before not in HYDRA_FLAGS]
    multirun = any(a in ("-m", "--multirun") for a in arguments)
    quiet_libraries("verbose=true" in (o.lower() for o in overrides))
    # A polite kill ends a run as Ctrl-C does: with everything so far written.
    signal.signal(signal.SIGTERM, _interrupt)
    made: list[Path] = []
    try:
        for run in check_jobs(overrides, multirun):
            if not HYDRA_FLAGS.intersection(arguments):  # such flags show something and run nothing
                made += make_folder(Path(run.output_dir))
        job()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was finished is in the run's folder", file=sys.stderr)
        return INTERRUPTED
    finally:
        from simulation.ray import stop_ray

        stop_ray()
        for folder in made:  # Hydra names a run's folder anew, and by then a second may have passed
            with contextlib.suppress(OSError):
                folder.rmdir()
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


if __name__ == "__main__":
    status = main()
    if status == INTERRUPTED:
        # A thread of Flower's runtime may wait for ever on a worker that Ctrl-C ended; everything is written by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
