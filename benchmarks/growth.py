"""Measure how a run grows: clients 10^2 to 10^6, participants 10 to 10,000, rounds to 100,000. FedAvg on a tiny model.

    python benchmarks/growth.py --rows growth.jsonl                     # every cell, with their table
    python benchmarks/growth.py --rows growth.jsonl --draw growth.svg   # the table and the figure of earlier cells
    python benchmarks/growth.py --rows growth.jsonl --parts participants --engines local pfl --pfl peers/bin/python

Each cell is one process of at most ``--limit`` seconds. Cells take turns, and values are medians. CPU is a round's CPU time in
the process. The start-up is the time until the first round begins, and what this round takes beyond a median one. MiB is the
largest proportional size in memory of the process and of all that it started. The engine ``stacks`` is ``engine=local`` with
``engine.stack_size=auto``. The engine ``plain`` is Flower's simulation with its FedAvg, and clients that do nothing. The engine
``pfl`` is Apple's, in the environment of ``--pfl``. The options ``--least`` and ``--most`` choose cells by size.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# part: (clients, participants, rounds). A round has one step of 32 examples.
PARTS = {
    "clients": [(10**power, 10, 20) for power in range(2, 7)],
    "participants": [(20_000, count, 5) for count in (10, 100, 1_000, 10_000)],
    "rounds": [(100, 10, count) for count in (100, 1_000, 10_000, 100_000)],
}
BEGAN = time.perf_counter()  # about the start of the process, because all large modules are imported later
NAMES = {"plain": "Flower alone", "stacks": "local, in stacks"}
EXAMPLES, STEP = 160, 32  # of a client, and of its step
COMMON = (
    "dataset=npz", "model=mlp", "model.hidden=[16]", "partition=sampled", f"partition.examples_per_client={EXAMPLES}",
    "eval_every=1000000", "strategy=fedavg", "strategy.local.iterations=1", f"strategy.local.batch_size={STEP}",
    "tracker=none", "strategy.local.lr=0.01", "participation=uniform",
)  # fmt: skip


def sum_memory(root: int) -> float:
    """Return the proportional memory of a process and its descendants, MiB."""
    parents = {}
    for entry in Path("/proc").iterdir():
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (ValueError, OSError):
            continue
    found = {root}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    total = 0
    for process in found:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


class Rounds:
    """The moments at which rounds end, from the start of the process."""

    def __init__(self) -> None:
        self.seconds, self.cpu = list[float](), list[float]()

    def end(self, *_: Any) -> None:
        """Note the end of a round. The first call is before round 1."""
        self.seconds.append(time.perf_counter() - BEGAN)
        self.cpu.append(time.process_time())

    def about(self) -> dict[str, float]:
        """Return the start-up's seconds, and the median wall and CPU seconds of a round after the first."""
        seconds, cpu = (statistics.median(b - a for a, b in itertools.pairwise(v[1:])) for v in (self.seconds, self.cpu))
        return {"start": max(self.seconds[0], self.seconds[1] - seconds), "seconds": seconds, "cpu": cpu}


def ours(engine: str, clients: int, participants: int, rounds: int, folder: Path) -> Rounds:
    """Run a setting on one of Contrafed's engines."""
    from contrafed import compose, run

    done = Rounds()
    sizes = (f"num_clients={clients}", f"participation.select={participants}", f"num_rounds={rounds}")
    how = ("engine=local", "engine.stack_size=auto") if engine == "stacks" else (f"engine={engine}",)
    where = (f"dataset.path={folder / 'images.npz'}", f"output_dir={folder / str(os.getpid())}")
    run(compose(*COMMON, *sizes, *how, *where), on_round=done.end)
    return done


def plain(clients: int, participants: int, rounds: int) -> Rounds:
    """Run Flower's simulation and its FedAvg. Its clients return what they receive, so that only Flower is measured."""
    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server, done = ClientApp(), ServerApp(), Rounds()

    @client.train()
    def train(message, context):
        records = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": EXAMPLES})}
        return Message(RecordDict(records), reply_to=message)

    class Timed(FedAvg):
        def configure_train(self, *arguments):
            done.end()
            return super().configure_train(*arguments)

    @server.main()
    def serve(grid, context):
        shared = participants / clients
        strategy = Timed(fraction_train=shared, fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=clients)
        model = torch.nn.Sequential(torch.nn.Linear(3072, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds + 1)

    resources = {"client_resources": {"num_cpus": 1.0}, "init_args": {"include_dashboard": False}}
    run_simulation(server, client, clients, backend_config=resources)
    return done


def pfl(clients: int, participants: int, rounds: int, folder: Path) -> Rounds:
    """Run the setting in Apple's pfl, on one thread."""
    import numpy as np
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(1)
    done = Rounds()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(3072, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))

        def loss(self, x, y, is_eval=False):
            return torch.nn.functional.cross_entropy(self.inner(x.flatten(1)), y)

        def metrics(self, x, y, is_eval=True):
            return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}

    x, y = (torch.from_numpy(np.load(folder / "images.npz")[name]) for name in ("x", "y"))

    def load(user):
        rows = np.random.default_rng([0, user]).integers(0, 40_000, EXAMPLES)
        return Dataset((x[rows].float() / 255, y[rows]))

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            done.end()
            return False, Metrics()

    users = np.random.default_rng(0)
    federated = FederatedDataset(load, lambda: int(users.integers(0, clients)))
    wrapped = PyTorchModel(model := Model(), torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0))
    done.end()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=participants, val_cohort_size=None
        ),
        backend=SimulatedBackend(training_data=federated, val_data=None),
        model=wrapped,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=None, local_num_steps=1, local_learning_rate=0.01, local_batch_size=STEP
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=STEP),
        callbacks=[Clock()],
    )
    return done


def cell(engine: str, clients: int, participants: int, rounds: int, folder: Path) -> dict[str, float]:
    """Measure one setting in this process."""
    peak, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            peak[0] = max(peak[0], sum_memory(os.getpid()))

    threading.Thread(target=watch, daemon=True).start()
    if engine == "plain":
        done = plain(clients, participants, rounds)
    elif engine == "pfl":
        done = pfl(clients, participants, rounds, folder)
    else:
        done = ours(engine, clients, participants, rounds, folder)
    ended.set()
    return {**done.about(), "MiB": max(peak[0], sum_memory(os.getpid()))}


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure the cells in turn, and append each to the file of rows."""
    from run import images

    images(folder / "images.npz")
    for _ in range(options.repeats):
        for part, engine in itertools.product(options.parts, options.engines):
            place = list(PARTS).index(part)
            for sizes in (found for found in PARTS[part] if options.least <= found[place] <= options.most):
                python = options.pfl if engine == "pfl" else sys.executable
                command = [python, __file__, "--cell", engine, *map(str, sizes), str(folder)]
                row = {"part": part, "sizes": sizes, "engine": engine} | run_cell(command, options.limit)
                with options.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def run_cell(command: list[str], limit: float) -> dict[str, Any]:
    """Return what a cell measured, or why it is left out. All processes that it started end with it."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return {"left": f"over {limit:g} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        print(f"{command[3:-1]}: {(errors.strip().splitlines() or [''])[-1]}", file=sys.stderr)
        return {"left": "failed"}
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def medians(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the median values of each cell, and why it has none."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["part"], *row["sizes"], row["engine"]), []).append(row)
    order = {part: i for i, part in enumerate(PARTS)}
    out = {}
    for key, cells in sorted(found.items(), key=lambda item: (order[item[0][0]], *item[0][1:4])):
        good = [cell for cell in cells if "left" not in cell]
        out[key] = {n: statistics.median(c[n] for c in good) for n in ("start", "seconds", "cpu", "MiB")} if good else cells[-1]
    return out


def table(found: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    """Print the table of the cells."""
    print("| clients | participants | rounds | engine | start-up, s | s / round | CPU s / round | MiB |")
    print("| ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for (_, *sizes, engine), row in found.items():
        values = [row.get("left", ""), "", "", ""]
        if "left" not in row:
            values = [f"{row['start']:.1f}", f"{row['seconds']:.4f}", f"{row['cpu']:.4f}", f"{row['MiB']:.0f}"]
        print(f"| {' | '.join([*(f'{size:,}' for size in sizes), NAMES.get(engine, engine), *values])} |")


def draw(found: dict[tuple[Any, ...], dict[str, Any]], path: Path) -> None:
    """Draw seconds a round, memory and start-up against clients, participants and rounds."""
    import matplotlib.pyplot as plt

    names = {"seconds": "s / round", "MiB": "MiB", "start": "start-up, s"}
    parts = {key[0] for key, row in found.items() if "seconds" in row}
    figure, axes = plt.subplots(
        len(parts), 3, figsize=(10, 2.75 * len(parts)), sharex="row", squeeze=False, layout="constrained"
    )
    engines = list(dict.fromkeys(key[-1] for key in found))
    places = [(place, part) for place, part in enumerate(PARTS, 1) if part in parts]
    for line, (place, part) in zip(axes, places, strict=True):
        for (axis, name), engine in itertools.product(zip(line, names, strict=True), engines):
            rows = [(key[place], row) for key, row in found.items() if (key[0], key[-1]) == (part, engine) and name in row]
            axis.plot([size for size, _ in rows], [row[name] for _, row in rows], marker="o", label=NAMES.get(engine, engine))
            axis.set(xscale="log", yscale="log" if name == "seconds" else "linear", xlabel=part, ylabel=names[name])
    for axis in axes[:, 1:].flat:
        axis.set_ylim(bottom=0)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(engines))
    figure.savefig(path)


def main() -> None:
    """Measure cells, then print the table of all rows in the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="file of measured cells, JSON lines")
    parser.add_argument("--draw", type=Path, help="measure nothing, and write the figure to this file")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--engines", nargs="+", default=["local", "stacks", "ray", "plain"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--least", type=int, default=0, help="of clients, participants or rounds in a cell of their part")
    parser.add_argument("--most", type=int, default=10**6)
    parser.add_argument("--limit", type=float, default=180, help="seconds of a cell")
    parser.add_argument("--pfl", default=sys.executable, help="Python with pfl and torch")
    parser.add_argument("--cell", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        engine, *sizes, folder = options.cell
        sys.stdout, out = sys.stderr, sys.stdout  # a run prints its own progress
        print(json.dumps(cell(engine, *map(int, sizes), Path(folder))), file=out)
        return
    if options.rows is None:
        parser.error("--rows names the file of measured cells")
    if options.draw is None:
        with tempfile.TemporaryDirectory() as folder:
            measure(options, Path(folder))
    found = medians([json.loads(line) for line in options.rows.read_text().splitlines()])
    table(found)
    if options.draw is not None:
        draw(found, options.draw)


if __name__ == "__main__":
    main()
