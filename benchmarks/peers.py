"""Measure seconds per round of BlazeFL and fluke. ``benchmarks/run.py --peers PYTHON`` calls this file, in turns with ours.

They have a second environment, without Contrafed:

    python3.12 -m venv peers && peers/bin/pip install blazefl==2.0.3 fluke-fl==0.8.1 pfl==0.6.0

Data, network and schedule are those of ``run.py``. A client has five batches of 32, so five steps are one epoch. BlazeFL trains
in one thread per core, fluke in one thread. ``with reused memory`` has Contrafed's allocator settings, by glibc's variables.
"""

import enum
import itertools
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

CLIENTS, EXAMPLES, STEP, LR = 250, 160, 32, 0.01
# As contrafed.engines.worker.reuse_memory, for the environment of a process.
REUSED = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_TOP_PAD_": str(64 << 20)}


class Network(nn.Module):
    """MpFedcon's CNN without projector, 307,842 parameters."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
        hidden = [nn.Flatten(), nn.Linear(1600, 120), nn.ReLU(), nn.Linear(120, 64), nn.ReLU()]
        self.encoder, self.head = nn.Sequential(*convolutions, *hidden), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, 10) of images (B, 3, 32, 32)."""
        found: torch.Tensor = self.head(self.encoder(x))
        return found


def load(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images (N, 3, 32, 32), converted once, outside the rounds, and their labels (N,)."""
    x, y = (torch.from_numpy(np.load(folder / "images.npz")[name]) for name in ("x", "y"))
    return x.permute(0, 3, 1, 2).float() / 255, y


def blazefl(clients: int, rounds: int, folder: Path) -> list[float]:
    """Return the moments at which rounds of FedAvg end, with BlazeFL's thread pool and its own server."""
    from blazefl.contrib.fedavg import FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer
    from torch.utils.data import DataLoader, TensorDataset

    x, y = load(folder)

    class Data:
        def get_dataloader(self, type_: Any, cid: int, batch_size: int, generator: Any) -> Any:
            some = slice(EXAMPLES * cid, EXAMPLES * (cid + 1))
            return DataLoader(TensorDataset(x[some], y[some]), batch_size, shuffle=True, generator=generator)

    class Selector:
        def select_model(self, model_name: str) -> nn.Module:
            return Network()

    class Names(enum.StrEnum):
        CNN = "cnn"

    torch.set_num_threads(1)
    about: dict[str, Any] = {
        "model_selector": Selector(),
        "model_name": Names.CNN,
        "dataset": Data(),
        "device": "cpu",
        "seed": 0,
    }
    about |= {"num_clients": CLIENTS, "batch_size": STEP}
    server = FedAvgBaseServerHandler(**about, global_round=rounds, sample_ratio=clients / CLIENTS)
    trainer = FedAvgThreadPoolClientTrainer(**about, epochs=1, lr=LR, num_parallels=os.cpu_count() or 1)
    moments = []
    while not server.if_stop():
        trainer.local_process(server.downlink_package(), server.sample_clients())
        for package in trainer.uplink_package():
            server.load(package)
        moments.append(time.perf_counter())
    return moments


def fluke(clients: int, rounds: int, folder: Path, method: str) -> list[float]:
    """Return the moments at which rounds of fluke's FedAvg or MOON end."""
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.algorithms.moon import MOON
    from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader

    torch.set_num_threads(1)
    x, y = load(folder)
    parts = [slice(EXAMPLES * k, EXAMPLES * (k + 1)) for k in range(CLIENTS)]
    train = [FastDataLoader(x[p], y[p], num_labels=10, batch_size=STEP, shuffle=True) for p in parts]
    test = FastDataLoader(x[-64:], y[-64:], num_labels=10, batch_size=64)
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_eval_cfg(task="classification", eval_every=10**6, pre_fit=False, post_fit=False, server=False, locals=False)
    data = DummyDataContainer(train, [None] * CLIENTS, test, 10)
    splitter = DataSplitter(dataset=data, distribution="iid", client_split=0.0, keep_test=True, server_test=True)
    more = {"mu": 5.0, "tau": 0.5} if method == "moon" else {}
    client = DDict(
        batch_size=STEP, local_epochs=1, loss="CrossEntropyLoss", optimizer=DDict(name="SGD", lr=LR),
        scheduler=DDict(name="StepLR", step_size=1, gamma=1.0), **more,
    )  # fmt: skip
    settings = DDict(client=client, server=DDict(weighted=True), model=Network())
    algorithm = (MOON if method == "moon" else FedAVG)(CLIENTS, splitter, settings)
    aggregate, moments = algorithm.server.aggregate, []

    def aggregate_and_note(*arguments: Any, **more: Any) -> Any:
        out = aggregate(*arguments, **more)
        moments.append(time.perf_counter())
        return out

    algorithm.server.aggregate = aggregate_and_note
    algorithm.run(rounds, clients / CLIENTS, finalize=False)
    return moments


def main() -> None:
    """Measure one cell: PEER SETTING CLIENTS ROUNDS WARM_UP FOLDER."""
    peer, setting, *numbers, folder = sys.argv[1:]
    clients, rounds, warm_up = map(int, numbers)
    sys.stdout, out = sys.stderr, sys.stdout  # the measured code prints its own progress
    if peer.startswith("blazefl"):
        moments = blazefl(clients, rounds, Path(folder))
    else:
        moments = fluke(clients, rounds, Path(folder), setting)
    seconds = statistics.median(b - a for a, b in itertools.pairwise(moments[warm_up:]))
    print(json.dumps({"seconds": seconds, "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}), file=out)


if __name__ == "__main__":
    main()
