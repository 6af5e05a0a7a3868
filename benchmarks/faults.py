"""Inject random faults into runs, reports and command lines, and count tracebacks and numbers that changed without a word.

    python benchmarks/faults.py --faults 200
    python benchmarks/faults.py --faults 0 --ray 9    # a stopped worker, a killed raylet, a killed GCS, in turns

Each fault is drawn from ``--seed``. A fault is survived if what follows is one line (an error of the exit status 1 or 2) or the
bytes of an undisturbed run. It prints a row for each kind: times tried, refused in one line, survived, lost.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from contrafed import UserError, compose, report_command, run
from contrafed.config.overrides import quote_value
from contrafed.core.errors import RunStopped
from contrafed.engines import ray_liveness
from contrafed.runs.output import RunRecorder

SMALL = ("strategy=pmfl", "engine=local", "num_clients=4", "num_rounds=4", "model=mlp", "model.hidden=[4]", "tracker=none")
PIECES = ("é", "数", "=", "[", "]", "{", "}", "'", '"', ",", " ", "\\", "x", "1", "runs/", "$", ":", "~", "-", "\ufeff")
REFUSED, SURVIVED, LOST, TRACEBACK = "refused in one line", "survived", "lost", "traceback"


def damage(path: Path, rng: random.Random) -> None:
    """Change a file as a disk, a program or a person might."""
    content, how = path.read_bytes(), rng.choice(("flip", "cut", "empty", "garbage", "remove", "nested"))
    if how == "flip" and content:
        place = rng.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :])
    elif how == "cut":
        path.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif how == "garbage":
        path.write_bytes(rng.randbytes(len(content)))
    elif how == "remove":
        path.unlink()
    else:
        path.write_bytes(b"[" * 50_000 if how == "nested" else b"")


def outcome(folder: Path) -> tuple[bytes, ...]:
    """Return what a run leaves that its numbers are in."""
    return tuple((folder / name).read_bytes() for name in ("model.safetensors", "metrics.csv", "clients.csv"))


def resume_damaged(stopped: Path, whole: tuple[bytes, ...], work: Path, rng: random.Random) -> str:
    """Damage a file of a stopped run and resume it."""
    folder = work / "run"
    shutil.copytree(stopped, folder)
    damage(rng.choice([path for path in sorted(folder.rglob("*")) if path.is_file()]), rng)
    run(compose(*SMALL, "checkpoint_every=1", "resume=latest", f"output_dir={folder}"), unique=False)
    return SURVIVED if outcome(folder) == whole else LOST


def disturb_run(stopped: Path, whole: tuple[bytes, ...], work: Path, rng: random.Random) -> str:
    """Damage a log or the client state on disk in mid-run, then resume."""
    folder, spilled, when = work / "run", work / "spilled", rng.randrange(1, 4)
    spilled.mkdir()
    asked = (*SMALL, "checkpoint_every=1", "engine.memory_host_bytes=0", f"engine.memory_folder={spilled}")

    def on_round(server_round: int, values: dict[str, float]) -> None:
        files = [path for root in (folder, spilled) for path in root.rglob("*.*") if path.suffix in (".csv", ".safetensors")]
        if server_round == when:
            damage(rng.choice(sorted(path for path in files if "checkpoints" not in path.parts)), rng)

    with contextlib.suppress(RunStopped):
        run(compose(*asked, f"output_dir={folder}"), unique=False, on_round=on_round)
    run(compose(*asked, "resume=latest", f"output_dir={folder}"), unique=False)
    return SURVIVED if outcome(folder) == whole else LOST


def report_damaged(stopped: Path, whole: tuple[bytes, ...], work: Path, rng: random.Random) -> str:
    """Damage a file of one of two runs, of which a list is made."""
    for name in ("a", "b"):
        shutil.copytree(stopped, work / name)
    damage(rng.choice([path for path in sorted((work / "b").iterdir()) if path.is_file()]), rng)
    if report_command.main(["--list", str(work)]):
        raise UserError("refused")
    return SURVIVED


def type_anything(stopped: Path, whole: tuple[bytes, ...], work: Path, rng: random.Random) -> str:
    """Give a command line a path of any characters."""
    value = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 7)))
    compose(quote_value(f"output_dir={value}"))
    return SURVIVED


def save_any_yaml(stopped: Path, whole: tuple[bytes, ...], work: Path, rng: random.Random) -> str:
    """Compose with a damaged YAML of the user's own."""
    file = work / "experiment" / "e.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\nnum_clients: 10\npartition:\n  alpha: 0.5\n", encoding="utf-8")
    damage(file, rng)
    compose("experiment=e", config_dir=work)
    return SURVIVED


def find_ray_process(what: str) -> int:
    """Return the process of a worker of Ray, or of one of Ray's own processes."""
    from ray._private import worker
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    if what in ray_liveness.VITAL_PROCESSES:
        (about,) = worker._global_node.all_processes[what]  # type: ignore[union-attr]
        return int(about.process.pid)
    key = min(_internal_kv_list(b"", namespace=ray_liveness.NAMESPACE))
    _, process, _ = json.loads(_internal_kv_get(key, namespace=ray_liveness.NAMESPACE))
    return int(process)


def disturb_ray(what: str, sent: signal.Signals, whole: tuple[bytes, ...], work: Path, rng: random.Random) -> str:
    """Send a signal to one of Ray's processes in mid-run, then resume."""
    folder, when = work / "run", rng.randrange(1, 4)
    asked = (*SMALL, "engine=ray", "engine.workers=2", "checkpoint_every=1", f"output_dir={folder}")

    def on_round(server_round: int, values: dict[str, float]) -> None:
        if server_round == when:
            os.kill(find_ray_process(what), sent)

    with contextlib.suppress(RunStopped):
        run(compose(*asked), unique=False, on_round=on_round)
    run(compose(*asked, "resume=latest"), unique=False)
    return SURVIVED if outcome(folder) == whole else LOST


def stop_ray_worker(stopped: Path, whole: tuple[bytes, ...], work: Path, rng: random.Random) -> str:
    """Stop a worker by SIGSTOP."""
    return disturb_ray("worker", signal.SIGSTOP, whole, work, rng)


def kill_raylet(stopped: Path, whole: tuple[bytes, ...], work: Path, rng: random.Random) -> str:
    """Kill the raylet."""
    return disturb_ray("raylet", signal.SIGKILL, whole, work, rng)


def kill_gcs(stopped: Path, whole: tuple[bytes, ...], work: Path, rng: random.Random) -> str:
    """Kill Ray's control store."""
    return disturb_ray("gcs_server", signal.SIGKILL, whole, work, rng)


KINDS: tuple[Callable[..., str], ...] = (resume_damaged, disturb_run, report_damaged, type_anything, save_any_yaml)
RAY_KINDS: tuple[Callable[..., str], ...] = (stop_ray_worker, kill_raylet, kill_gcs)
# Seconds after which a stopped worker is replaced here.
PATIENCE_SECONDS = 15.0


def inject(kind: Callable[..., str], stopped: Path, whole: tuple[bytes, ...], rng: random.Random) -> tuple[str, str]:
    """Inject one fault; returns what became of it, and the error of a traceback."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as work, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            return kind(stopped, whole, Path(work), rng), ""
        except (UserError, RunStopped) as error:
            return (REFUSED, "") if "\n" not in str(error) else (TRACEBACK, str(error))
        except Exception as error:
            return TRACEBACK, f"{type(error).__name__}: {error}"


def main() -> None:
    """Inject faults and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="how many, of all kinds in turns")
    parser.add_argument("--seed", type=int, default=0, help="what the faults are drawn from")
    parser.add_argument("--ray", type=int, default=0, help="how many on engine=ray, beside the others: half a minute each")
    asked = parser.parse_args()
    tries = [KINDS[number % len(KINDS)] for number in range(asked.faults)]
    tries += [RAY_KINDS[number % len(RAY_KINDS)] for number in range(asked.ray)]
    rng, counts = random.Random(asked.seed), {kind.__name__: Counter[str]() for kind in tries}
    ray_liveness.MAX_SILENT_SECONDS = PATIENCE_SECONDS
    RunRecorder._draw = lambda self: None  # type: ignore[method-assign]  # figures take longer than the runs
    with tempfile.TemporaryDirectory() as place:
        with contextlib.redirect_stdout(io.StringIO()):
            run(compose(*SMALL, f"output_dir={place}/whole"), unique=False)
            run(compose(*SMALL, "checkpoint_every=1", f"output_dir={place}/stopped"), unique=False)
        whole = outcome(Path(place) / "whole")
        shutil.rmtree(Path(place) / "stopped" / "checkpoints" / "000004", ignore_errors=True)
        for number, kind in enumerate(tries):
            became, error = inject(kind, Path(place) / "stopped", whole, rng)
            counts[kind.__name__][became] += 1
            if became in (TRACEBACK, LOST):
                print(f"fault {number}, {kind.__name__}: {became} {error[:200]}", flush=True)
    print("| fault | times | survived | refused in one line | lost | tracebacks |\n| --- | --: | --: | --: | --: | --: |")
    for name, found in counts.items():
        cells = [found.total(), *(found[key] for key in (SURVIVED, REFUSED, LOST, TRACEBACK))]
        print(f"| {name} | {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
