"""Measure seconds per round of every engine and of other frameworks, with the same model, data and schedule.

    pip install -e ".[bench]" && python benchmarks/run.py            # every setting, five alternating repeats
    python benchmarks/run.py --settings floor work --repeats 3
    python benchmarks/run.py --settings work moon --peers peers/bin/python    # BlazeFL and fluke too (benchmarks/peers.py)

Each figure is the median over rounds of one process, then over processes. The processes take turns, so that a busy machine
slows all equally. The engine ``flower`` is Contrafed's strategy and clients in Flower's simulation runtime. With ``plain`` that
runtime has Flower's FedAvg and a client as in its tutorials. The peer ``bare`` is only the training loop, in as many concurrent
processes as Ray has workers. It has the allocator settings of Contrafed's engines, and ``bare as shipped`` has not.
"""

import argparse
import copy
import itertools
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# name: (overrides, clients per round, steps, batch size). There are 250 clients with 160 images of 32x32x3, and MpFedcon's CNN
# without projector.
COMMON_OVERRIDES = (
    "model=cnn5", "model.projection=[]", "num_clients=250", "partition=iid", "eval_every=1000000",
    "participation=uniform", "strategy.local.lr=0.01",
)  # fmt: skip
SETTINGS = {
    "floor": (("strategy=fedavg", "strategy.local.iterations=0", "participation.select=25"), 25, 0, 32),
    "work": (("strategy=fedavg", "strategy.local.batch_size=32", "participation.select=10"), 10, 5, 32),
    "pmfl": (("strategy=pmfl", "strategy.local.batch_size=32", "participation.select=10"), 10, 5, 32),
    "moon": (
        (
            "strategy=moon", "strategy.local.epochs=1", "strategy.local.batch_size=32", "strategy.local.momentum=0",
            "strategy.local.weight_decay=0", "participation.select=10",
        ), 10, 5, 32,
    ),
}  # fmt: skip
WHAT = {
    "floor": "25 of 250 clients do nothing",
    "work": "10 of 250 clients, 5 steps of batch 32, FedAvg",
    "pmfl": "10 of 250 clients, 5 steps of batch 32, PMFL with N = 5",
    "moon": "10 of 250 clients, 5 steps of batch 32, MOON",
}
NAMES = {"flower": "our apps in Flower's runtime", "plain": "Flower alone"}
# Rounds, and how many of them at the start are excluded, because memory that engines reuse is new in them.
ROUNDS = {"floor": (50, 20), "work": (12, 4), "pmfl": (12, 4), "moon": (12, 4)}


def images(path: Path, train: int = 40_000, test: int = 100, seed: int = 0) -> None:
    """Write random images, ``train`` of them for training and ``test`` for testing."""
    import numpy as np

    rng, count = np.random.default_rng(seed), train + test
    x = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    np.savez(path, x=x, y=rng.integers(0, 10, count), split=np.arange(count) >= train)


def engine(name: str, setting: str, folder: Path) -> dict[str, float]:
    """Run a setting on one of Contrafed's engines, and return the seconds per round from the run's log."""
    from contrafed import compose, run

    overrides, *_ = SETTINGS[setting]
    rounds, warm_up = ROUNDS[setting]
    where = (f"dataset.path={folder / 'images.npz'}", f"output_dir={folder / 'run'}", f"num_rounds={rounds}")
    summary = run(compose("dataset=npz", *COMMON_OVERRIDES, *overrides, *where, f"engine={name}"))
    rows = (Path(summary["folder"]) / "times.csv").read_text().splitlines()[2 + warm_up :]
    return {"seconds": statistics.median(float(row.split(",")[1]) for row in rows)}


def loop(setting: str, clients: int, reused: bool) -> float:
    """Return the seconds that the plain training loop of ``clients`` clients takes in this process.

    ``reused`` makes the allocator keep freed memory, as in Contrafed's engines.

    For PMFL it includes the frozen forward passes of a client's first participation: at each step the received model and the
    earlier iterates. Later participations need more.
    """
    import torch
    from omegaconf import OmegaConf

    from contrafed import compose
    from contrafed.core.build import build_model
    from contrafed.core.client_run import choose
    from contrafed.engines.worker import reuse_memory

    torch.set_num_threads(1)
    if reused:
        reuse_memory()
    _, _, steps, size = SETTINGS[setting]
    rounds, warm_up = ROUNDS[setting]
    settings = choose("model", OmegaConf.to_container(compose(*COMMON_OVERRIDES).model))
    model = build_model(settings, 3, (32, 32), 10, 0)
    frozen = [copy.deepcopy(model) for _ in range(steps)] if setting == "pmfl" else []
    start = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(size, 32, 32, 3).permute(0, 3, 1, 2)  # channels last, as in Contrafed's engines
    y = torch.randint(0, 10, (size,))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(clients):
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            for step in range(steps):
                with torch.no_grad():
                    for other in frozen[: max(step, 1)]:
                        other(x)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x).logits, y).backward()
                optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[warm_up:])


def bare(setting: str, reused: bool) -> dict[str, float]:
    """Run the bare loop in one process per core at the same time. The slowest one is the round's time."""
    _, clients, *_ = SETTINGS[setting]
    workers = os.cpu_count() or 1
    shares = [clients // workers + (i < clients % workers) for i in range(workers)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return {"seconds": max(pool.starmap(loop, [(setting, share, reused) for share in shares]))}


def between(moments: list[float]) -> float:
    """Return the median time from one moment to the next."""
    return statistics.median(b - a for a, b in itertools.pairwise(moments))


def pfl(setting: str, folder: Path) -> dict[str, float]:
    """Run the setting in Apple's pfl, which is serial in its simulation on one process."""
    import numpy as np
    import torch
    from omegaconf import OmegaConf
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    from contrafed import compose
    from contrafed.core.build import build_model
    from contrafed.core.client_run import choose

    _, clients, steps, size = SETTINGS[setting]
    rounds, warm_up = ROUNDS[setting]
    inner = build_model(choose("model", OmegaConf.to_container(compose(*COMMON_OVERRIDES).model)), 3, (32, 32), 10, 0)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def loss(self, x, y, is_eval=False):
            return torch.nn.functional.cross_entropy(self.inner(x).logits, y)

        def metrics(self, x, y, is_eval=True):
            return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}

    x, y = (torch.from_numpy(np.load(folder / "images.npz")[name]) for name in ("x", "y"))
    x = x.permute(0, 3, 1, 2).float() / 255  # converted once, outside the rounds
    parts = np.array_split(np.arange(40_000), 250)
    users = iter(np.random.default_rng(0).integers(0, 250, 10_000).tolist())
    federated = FederatedDataset(lambda user: Dataset((x[parts[user]], y[parts[user]])), lambda: next(users))
    wrapped = PyTorchModel(model := Model(), torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0))
    times: list[float] = []

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            times.append(time.perf_counter())
            return False, Metrics()

    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=clients, val_cohort_size=None
        ),
        backend=SimulatedBackend(training_data=federated, val_data=None),
        model=wrapped,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=None, local_num_steps=steps, local_learning_rate=0.01, local_batch_size=size
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=size),
        callbacks=[Clock()],
    )
    return {"seconds": between(times[warm_up:])}


def plain(setting: str, folder: Path) -> dict[str, float]:
    """Run the setting in Flower alone: its simulation runtime, its FedAvg, and a client as in its tutorials."""
    import numpy as np
    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation
    from omegaconf import OmegaConf

    from contrafed import compose
    from contrafed.core.build import build_model
    from contrafed.core.client_run import choose

    _, clients, steps, size = SETTINGS[setting]
    rounds, warm_up = ROUNDS[setting]
    settings = choose("model", OmegaConf.to_container(compose(*COMMON_OVERRIDES).model))
    file = folder / "images.npz"
    client, server, begun = ClientApp(), ServerApp(), []

    @client.train()
    def train(message, context):
        torch.set_num_threads(1)
        # The function is new for every message, so its data are made once per process and stored in a module.
        workspace = sys.modules.setdefault("contrafed_benchmark", types.SimpleNamespace())
        if not hasattr(workspace, "model"):
            workspace.model = build_model(settings, 3, (32, 32), 10, 0)
            data = np.load(file)
            workspace.x, workspace.y = torch.from_numpy(data["x"]).permute(0, 3, 1, 2), torch.from_numpy(data["y"])
        workspace.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        own = torch.arange(160) + 160 * context.node_config["partition-id"]
        optimizer = torch.optim.SGD(workspace.model.parameters(), 0.01)
        for step in range(steps):
            rows = own[step * size : (step + 1) * size]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                workspace.model(workspace.x[rows].float() / 255).logits, workspace.y[rows]
            ).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(own)})
        content = RecordDict({"arrays": ArrayRecord(workspace.model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    class Timed(FedAvg):
        def configure_train(self, *arguments):
            begun.append(time.perf_counter())
            return super().configure_train(*arguments)

    @server.main()
    def serve(grid, context):
        strategy = Timed(fraction_train=clients / 250, fraction_evaluate=0.0, min_available_nodes=250)
        strategy.start(grid, ArrayRecord(build_model(settings, 3, (32, 32), 10, 0).state_dict()), num_rounds=rounds + 1)

    resources = {"client_resources": {"num_cpus": 1.0}, "init_args": {"include_dashboard": False}}
    run_simulation(server, client, 250, backend_config=resources)
    return {"seconds": between(begun[warm_up:])}


def cell(peer: str, setting: str, folder: Path) -> dict[str, float]:
    """Measure one framework on one setting in this process."""
    name, _, settings = peer.partition(" ")
    if name in ("pfl", "plain") and settings:
        from contrafed.engines.worker import reuse_memory

        reuse_memory()
    if name == "bare":
        measured = bare(setting, reused=not settings)
    elif name == "pfl":
        measured = pfl(setting, folder)
    elif peer == "plain":
        measured = plain(setting, folder)
    else:
        measured = engine(peer, setting, folder)
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {**measured, "megabytes": max(own, children) / 1024}


def peers(setting: str, others: bool) -> list[str]:
    """Return what is measured on a setting. Other frameworks do not have our methods, and pfl's rounds and a loop need a
    step. Peers are measured as shipped and with the allocator settings of Contrafed's engines.

    Args:
        setting: The setting.
        others: Whether the peers of ``peers.py`` are measured too.
    """
    fluke = ["fluke", "fluke with reused memory"] if others else []
    blazefl = ["blazefl", "blazefl with reused memory"] if others else []
    beside = {
        "floor": ["plain"],
        "work": ["plain", "bare", "bare as shipped", "pfl", "pfl with reused memory", *blazefl, *fluke],
        "pmfl": ["bare", "bare as shipped"],
        "moon": fluke,
    }
    return ["ray", "local", "flower", *beside[setting]]


def command_of(peer: str, setting: str, folder: str, python: str | None) -> tuple[list[str], dict[str, str]]:
    """Return the command that measures a cell, and its environment."""
    if not peer.startswith(("blazefl", "fluke")):
        return [sys.executable, __file__, "--cell", peer, setting, folder], dict(os.environ)
    import peers as others

    numbers = [SETTINGS[setting][1], *ROUNDS[setting]]
    reused = others.REUSED if "reused" in peer else {}
    return [str(python), others.__file__, peer, setting, *map(str, numbers), folder], {**os.environ, **reused}


def main() -> None:
    """Measure every cell in turn, repeatedly, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", metavar="PYTHON", help="Python of the environment of peers.py")
    parser.add_argument("--cell", nargs=3, metavar=("PEER", "SETTING", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        peer, setting, folder = options.cell
        sys.stdout, out = sys.stderr, sys.stdout  # the measured code prints its own progress
        print(json.dumps(cell(peer, setting, Path(folder))), file=out)
        return
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        images(Path(folder) / "images.npz")
        for repeat in range(options.repeats):
            for setting in options.settings:
                for peer in peers(setting, options.peers is not None):
                    command, environment = command_of(peer, setting, folder, options.peers)
                    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
                    if done.returncode == 0:
                        found.setdefault((setting, peer), []).append(json.loads(done.stdout.splitlines()[-1]))
                    elif repeat == 0:
                        print(f"{peer} could not run {setting}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
    from contrafed.runs.output import versions

    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {versions()}")
    print(f"median seconds per round of {options.repeats} alternating repeats; memory of the largest process\n")
    print("| setting | engine | s / round | x bare | x ray | MiB |\n| --- | --- | --- | --- | --- | --- |")
    medians = {
        key: {name: statistics.median(row[name] for row in rows) for name in ("seconds", "megabytes")}
        for key, rows in sorted(found.items(), key=lambda item: list(SETTINGS).index(item[0][0]))
    }
    for (setting, peer), median in medians.items():
        others = (medians.get((setting, other)) for other in ("bare", "ray"))
        ratios = [f"{median['seconds'] / other['seconds']:.2f}" if other else "-" for other in others]
        row = [WHAT[setting], NAMES.get(peer, peer), f"{median['seconds']:.4f}", *ratios, f"{median['megabytes']:.0f}"]
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
