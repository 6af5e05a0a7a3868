"""Measure the cost of parts, each compared with the least that its work could cost, in turns in one process.

    python benchmarks/scale.py                      # all that needs no GPU
    python benchmarks/scale.py contrast stacking --device cuda                   # on a GPU

contrast    a step with frozen models: PMFL and MOON against FedAvg's, and against one step and its distinct frozen passes
balance     a round of clients of very unequal size with engine=ray against max(total / workers, longest client)
population  a round of 100 participants among 1,000 and among 1,000,000 clients, with start-up and memory
memory      PMFL on ResNet-18 with client state on every tier: seconds a round and bytes
aggregate   PMFL's aggregation, 25 replies of 11 million parameters, against one pass over them
checkpoint  a run that saves every 10 rounds against one that does not
stacking    PMFL's CIFAR-10 setting, 25 clients a round as one stack against one by one, and FedRCL on ResNet-18
bookkeeping CPU time of what 25 clients of a stack take besides computation, by part
host        CPU time of a stacked round of 25 clients without its computation
"""

import argparse
import copy
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bookkeeping import bookkeeping, host  # noqa: E402
from contrast import contrast  # noqa: E402
from run import images  # noqa: E402
from timing import compose_on, in_turns, run_logged, seconds_of  # noqa: E402

REPEATS = 5


# --------------------------------------------------------------------------------------------------------------- balance


def client_times(clients: list[tuple[int, int]], frozen: int, barrier: Any) -> list[float]:
    """Return the seconds that the bare loop takes for each client of a round. All processes begin together."""
    import torch
    from omegaconf import OmegaConf

    from contrafed import compose
    from contrafed.core.build import build_model
    from contrafed.core.client_run import choose
    from contrafed.engines.worker import reuse_memory

    torch.set_num_threads(1)
    reuse_memory()
    model = build_model(choose("model", OmegaConf.to_container(compose("model=cnn5").model)), 3, (32, 32), 10, 0)
    others = [copy.deepcopy(model) for _ in range(frozen)]
    start = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(32, 32, 32, 3).permute(0, 3, 1, 2)
    y = torch.randint(0, 10, (32,))
    out = []
    barrier.wait()
    for steps, last in clients:
        began = time.perf_counter()
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), 0.001)
        for step in range(steps):
            size = last if step == steps - 1 else 32
            with torch.no_grad():
                # PMFL's Z is in the buffer for five steps. Before and after them it takes another pass.
                for other in others[: len(others) - (1 <= step <= 5)]:
                    other(x[:size])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[:size]).logits, y[:size]).backward()
            optimizer.step()
        out.append(time.perf_counter() - began)
    return out


def balance(folder: Path, repeats: int) -> None:
    """Measure rounds of one epoch of 20 clients of Dirichlet sizes, and after each round the bare loop of the same clients."""
    import numpy as np
    from omegaconf import OmegaConf

    from contrafed.core.client_run import client_run_of
    from contrafed.data.federation import load_federation
    from contrafed.runs.output import RoundLog

    workers, skipped = os.cpu_count() or 1, 3
    clients = (
        "model=cnn5", "num_clients=20", "participation=full", "partition=dirichlet", "partition.alpha=0.1",
        "partition.min_client_size=8", "partition.test_fraction=0", "strategy.local.batch_size=32", "strategy.local.lr=0.001",
        "strategy.local.iterations=null", "strategy.local.epochs=1", "eval_every=1000000",
        f"num_rounds={skipped + 2 * repeats}",
    )  # fmt: skip
    print("| method | s / round | least | ratio | examples of the clients |\n| --- | --- | --- | --- | --- |")
    write = RoundLog.write
    for method, frozen in (("fedavg", 0), ("pmfl", 7)):
        overrides = (f"strategy={method}", *clients)
        config = OmegaConf.to_container(compose_on(folder, *overrides, data="few.npz"))
        sizes = load_federation(client_run_of(config)).partition.sizes
        work = [(-(-n // 32), (n - 1) % 32 + 1) for n in sizes.tolist()]
        measured, least = [], []
        spawn = multiprocessing.get_context("spawn")
        with spawn.Manager() as manager, spawn.Pool(workers) as pool:
            barrier = manager.Barrier(workers)

            def bare(self, done, pool=pool, barrier=barrier, work=work, frozen=frozen, measured=measured, least=least):
                write(self, done)
                if done.server_round >= skipped:  # the first of these is new to its processes
                    times = np.array(pool.starmap(client_times, [(work, frozen, barrier)] * workers)).mean(0)
                    measured.append(done.seconds)
                    least.append(max(times.sum() / workers, times.max()))

            RoundLog.write = bare  # type: ignore[method-assign]
            try:
                run_logged(folder, *overrides, "engine=ray", data="few.npz")
            finally:
                RoundLog.write = write  # type: ignore[method-assign]
        ratios = [a / b for a, b in zip(measured[1:], least[1:], strict=True)]
        a, b, c = (statistics.median(values) for values in (measured[1:], least[1:], ratios))
        print(f"| {method} | {a:.2f} | {b:.2f} | {c:.2f} | {sizes.min()} to {sizes.max()}, {sizes.sum()} in all |")


# ------------------------------------------------------------------------------------------------------------ population


def population(folder: Path, repeats: int) -> None:
    """Measure PMFL with 100 participants a round and engine=local, each in its own process."""
    found: dict[int, list[tuple[float, float, float]]] = {1_000: [], 1_000_000: []}
    for _ in range(repeats):
        for count, rows in found.items():
            command = [sys.executable, __file__, "--population", str(count), str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append(tuple(float(value) for value in done.stdout.splitlines()[-1].split()))  # type: ignore[arg-type]
    print("| clients | s / round | start-up s | MiB after start-up |\n| --- | --- | --- | --- |")
    for count, rows in found.items():
        a, b, c = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {count:,} | {a:.3f} | {b:.1f} | {c:.0f} |")


def one_population(count: int, folder: Path) -> None:
    """Print the seconds of a round, the seconds until round 1 began, and the memory at that time."""
    from contrafed.runs.output import RoundLog

    began, ready = time.perf_counter(), []
    write = RoundLog.write

    def note(self, done):
        if done.server_round == 0:
            # Not ru_maxrss, which a process inherits from its parent.
            status = Path("/proc/self/status").read_text().split()
            ready.append((time.perf_counter() - began, int(status[status.index("VmHWM:") + 1]) / 1024))
        write(self, done)

    RoundLog.write = note  # type: ignore[method-assign]
    rows, _ = run_logged(
        folder, "strategy=pmfl", "model=mlp", "model.hidden=[16]", f"num_clients={count}", "partition=sampled", "engine=local",
        "participation=uniform", "participation.select=100", "num_rounds=8", "eval_every=1000000",
    )  # fmt: skip
    print(seconds_of(rows, 2), *ready[0])


# ---------------------------------------------------------------------------------------------------------------- memory


def memory(folder: Path, repeats: int) -> None:
    """Measure 25 clients x 5 models of ResNet-18 (6.7 GB with previous ones), with and without a third of them on disk."""
    few = (
        "strategy=pmfl", "model=resnet18", "num_clients=25", "partition=sampled", "partition.examples_per_client=8",
        "strategy.local.batch_size=2", "participation=uniform", "participation.select=3", "num_rounds=12",
        "eval_every=1000000", "engine=local",
    )  # fmt: skip
    print("| client memory | s / round | moving it | device MB | RAM MB | disk MB |\n| --- | --- | --- | --- | --- | --- |")
    for title, tiers in (
        ("all in RAM", ("engine.memory_device_bytes=0", "engine.memory_host_bytes=100000000000")),
        ("device 1 GB, RAM 2 GB, disk", ("engine.memory_device_bytes=1000000000", "engine.memory_host_bytes=2000000000")),
    ):
        rows, _ = run_logged(folder, *few, f"engine.memory_folder={folder}", *tiers)
        moving = statistics.median(float(row[2]) for row in rows[4:])
        held = " | ".join(f"{int(value) / 1e6:.0f}" for value in rows[-1][3:])
        print(f"| {title} | {seconds_of(rows, 4):.2f} | {moving:.2f} | {held} |")


# ------------------------------------------------------------------------------------------------- aggregate, checkpoint


def aggregate(folder: Path, repeats: int) -> None:
    """Measure PMFL's aggregation, its weighted sum alone and the check of replies, against one pass over them on every core."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    import torch
    from omegaconf import OmegaConf

    from contrafed.config.run_config import resolve
    from contrafed.core.weighted_sum import cores
    from contrafed.engines.client_registry import Members
    from contrafed.engines.worker import reuse_memory
    from contrafed.runs.session import make_strategy
    from contrafed.server.base import Replies, Reply, Round
    from contrafed.server.replies import norm
    from contrafed.training.workspace import Workspace

    torch.set_num_threads(1)
    reuse_memory()
    pool = ThreadPoolExecutor(cores())
    config: Any = OmegaConf.to_container(compose_on(folder, "strategy=pmfl", "model=resnet18", "num_clients=250"))
    run = resolve(config)
    workspace = Workspace(run.client)
    counts = workspace.federation.partition.class_counts()
    strategy = make_strategy(run, workspace, Members(np.arange(250), workspace.federation, counts, ""), 100)
    replies = Replies(
        Reply(k, {f"delta/{name}": torch.randn(like.shape) for name, like in workspace.initial.items()}, 1, {})
        for k in range(25)
    )
    strategy.round = Round(2, replies.clients)
    weights = np.linspace(0.01, 0.1, 25)
    models = iter([{name: value.clone() for name, value in workspace.initial.items()} for _ in range(repeats + 1)])
    found = in_turns(
        {
            "read once": lambda: list(pool.map(lambda reply: [t.sum() for t in reply.tensors.values()], replies)),
            "PMFL's rule": lambda: strategy.aggregate(next(models), replies),
            "weighted sum": lambda: replies.weighted_sum("delta", weights),
            "check": lambda: [norm(reply.tensors.values()) for reply in replies],
        },
        repeats,
    )
    read = found["read once"]
    print(", ".join(f"{name} {seconds:.3f} s ({seconds / read:.2f})" for name, seconds in found.items()))


def checkpoint(folder: Path, repeats: int) -> None:
    """Measure checkpoints with PMFL's CNN, 50 clients, 10 a round, 5 steps of 16, 150 rounds."""
    base = (
        "strategy=pmfl", "model=cnn_pmfl", "num_clients=50", "partition=iid", "participation=uniform",
        "participation.select=10", "num_rounds=150", "eval_every=1000000", "engine=ray",
    )  # fmt: skip
    found: dict[str, list[float]] = {"null": [], "10": []}
    for _ in range(repeats):
        for every, seconds in found.items():
            _, summary = run_logged(folder, *base, f"checkpoint_every={every}")
            seconds.append(summary["seconds"])
    a, b = (statistics.median(seconds) for seconds in found.values())
    print(f"without {a:.2f} s, every 10 rounds {b:.2f} s: {100 * (b / a - 1):+.1f} %")


# -------------------------------------------------------------------------------------------------------------- stacking


def stacking(folder: Path, repeats: int, device: str) -> None:
    """Measure rounds with clients as one stack and one by one, on the same device, evaluated every 10 rounds as in a run."""
    settings = {
        "PMFL, its CNN, 25 of 250 clients x 5 steps of 16": (
            "strategy=pmfl", "model=cnn_pmfl", "num_clients=250", "partition=iid", "participation=uniform",
            "participation.select=25", "strategy.local.iterations=5", "strategy.local.batch_size=16",
        ),
        "FedRCL, ResNet-18, 5 of 100 clients x 50 steps of 50, bfloat16": (
            "strategy=fedrcl", "model=resnet18", "num_clients=100", "partition=iid", "participation=uniform",
            "participation.select=5", "strategy.local.iterations=50", "strategy.local.epochs=null",
            "strategy.local.batch_size=50", "strategy.local.mixed_precision=true", "strategy.local.augment=[]",
        ),
    }  # fmt: skip
    images(folder / "as_cifar10.npz", 50_000, 10_000, seed=2)
    rounds, skipped = 50 if device != "cpu" else 20, 10
    print("| setting | stack | s / round | rounds / s | 10,000 rounds, minutes |\n| --- | --- | --- | --- | --- |")
    for title, overrides in settings.items():
        if device == "cpu" and "ResNet" in title:
            continue
        common = (*overrides, "engine=local", f"engine.device={device}", f"num_rounds={rounds}", "eval_every=10")
        for stack in ("null" if device != "cpu" else "25", "1"):
            means = []
            for _ in range(repeats):
                rows, _ = run_logged(folder, *common, f"engine.stack_size={stack}", data="as_cifar10.npz")
                means.append(statistics.mean(float(row[1]) for row in rows if skipped < int(row[0])))
            seconds = statistics.median(means)
            print(f"| {title} | {stack} | {seconds:.4f} | {1 / seconds:.2f} | {10_000 * seconds / 60:.1f} |")


def main() -> None:
    """Run the requested parts and print their figures."""
    parts = {
        f.__name__: f for f in (contrast, balance, population, memory, aggregate, checkpoint, stacking, bookkeeping, host)
    }  # in the order of the text above
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--device", default="cpu", help="of contrast and stacking")
    parser.add_argument("--population", nargs=2, metavar=("COUNT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    if options.population:
        one_population(int(options.population[0]), Path(options.population[1]))
        return
    import torch

    from contrafed.runs.output.provenance import hardware

    print(f"{hardware(options.device)}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images(folder / "images.npz")
        images(folder / "few.npz", 6_000, 100, seed=1)
        for part in options.parts or [name for name in parts if name != "stacking"]:
            print(f"\n{part}\n")
            extra = {"device": options.device} if part in ("contrast", "stacking") else {}
            parts[part](folder, options.repeats, **extra)


if __name__ == "__main__":
    main()
