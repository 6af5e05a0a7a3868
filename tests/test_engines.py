"""The three engines give the same numbers."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from helpers import config_of, read_rows, slow, workspace_of
from safetensors.torch import load_file
from tiny import HALF_AVAILABLE, TINY_RUN, engines_agree, equals_local, run_tiny, tiny_workspace
from torch.func import functional_call

from contrafed.engines import flower, shared_memory
from contrafed.runs.run import run


# FedAvg has no client state, PMFL uploads updates and stores models, and FedCRL has personal parts and tables.
# One method for each shape of messages goes through every engine in test_every.py.
@pytest.mark.parametrize(
    ("method", "workers"),
    [("pmfl", 2), *(slow(*each) for each in (("fedavg", 2), ("fedcrl", 2), ("pmfl", 1)))],
)
def test_ray_equals_local_bit_for_bit(tmp_path, local_runs, monkeypatch, method, workers):
    renewed = []
    renew = shared_memory.Broadcast.renew
    monkeypatch.setattr(shared_memory.Broadcast, "renew", lambda self, size=None: (renewed.append(size), renew(self, size)))
    found = run_tiny(tmp_path / "run", f"strategy={method}", "engine=ray", f"engine.workers={workers}")
    equals_local(found, local_runs(method))
    assert None not in renewed, "a client kept hold of a broadcast, which then cannot use the same memory again"
    assert renewed or not hasattr(os, "memfd_create")  # shared memory was in use


@pytest.mark.parametrize("method", [slow("fedavg"), "pmfl"])
def test_flowers_own_runtime_equals_local_bit_for_bit(tmp_path, local_runs, method):
    equals_local(run_tiny(tmp_path / "run", f"strategy={method}", "engine=flower"), local_runs(method))


BATCHNORM = ("model=cnn_bn", "model.channels=[3]", "model.kernel=3", "strategy.local.last_batch=merge")
ATTACKED = ("strategy=fedavg", "attack.fraction=0.5", "participation=full", "participation.loss_rate=0.2")
SLOW_CLIENTS = ("strategy=fedavg", "num_rounds=4", "clock=lognormal", "clock.step_sigma=1.5", "participation=uniform",
                "participation.select=3", "participation.over_select=1.7")  # fmt: skip
BUFFERED = ("clock=lognormal", "schedule=buffered", "schedule.buffer_size=2", "schedule.concurrency=4", "num_rounds=7")
SAMPLED = ("partition=sampled", "partition.test_fraction=null")
# What engines must agree on beside the methods.
FEATURES = {
    "feature shift": (*SAMPLED, "strategy=fedavg", "partition.feature_shift.kind=noise"),
    "validation parts": ("strategy=fedper", "partition.validation_fraction=0.2", "save_personal=true"),
    "validation split": ("strategy=fedavg", "dataset.validation_fraction=0.2"),
    "wrong labels": (*ATTACKED, "attack=label_flip"),
    "attack": (*ATTACKED, "attack=alie"),
    "batchnorm": (*BATCHNORM, "strategy=fedavg"),
    "own batchnorm": (*BATCHNORM, "strategy=fedbn"),
    **{f"late {late}": (*SLOW_CLIENTS, f"participation.late={late}") for late in ("drop", "stale", "partial")},
    **{f"buffer of {method}": (*BUFFERED, f"strategy={method}") for method in ("fedavg", "fedper")},
}
ENGINES = {feature: ("ray",) if "buffer" in feature else ("ray", "flower") for feature in FEATURES}  # test_refusals.py


@pytest.mark.slow
@pytest.mark.parametrize(("feature", "engine"), [(feature, engine) for feature in FEATURES for engine in ENGINES[feature]])
def test_features_are_alike_in_every_engine(tmp_path, engine, feature):
    available = () if any(key.startswith("participation=") for key in FEATURES[feature]) else HALF_AVAILABLE
    engines_agree(tmp_path, engine, *TINY_RUN, *available, *FEATURES[feature])


def test_evaluation_in_parallel_shards_equals_one_pass():
    """Shards run in threads. Each must use the evaluated model, and the sums must not depend on the cores."""
    from contrafed.runs.evaluation import score

    config, workspace, _ = tiny_workspace("model=cnn_pmfl")
    index = np.arange(len(workspace.federation.data.y)).repeat(4)  # 7 shards
    logits, y = workspace.model(workspace.images(torch.from_numpy(index))).logits, workspace.y[index]
    config = {**config, "eval_train": False}
    for _ in range(5):
        loss, accuracy, counts = score(workspace, workspace.model, index)
        assert loss == pytest.approx(torch.nn.functional.cross_entropy(logits, y).item(), rel=1e-5)
        assert accuracy == (logits.argmax(1) == y).sum().item() / len(index)
        assert counts.sum(1).tolist() == torch.bincount(y, minlength=len(counts)).tolist()


def test_training_accuracy_is_that_of_the_model_that_is_tested(tmp_path):
    """With more than one shard of training data, scores must equal those of the saved model."""
    config = config_of("engine=local", "model=cnn_pmfl", "eval_train=true", "num_rounds=3", f"output_dir={tmp_path}/run")
    folder = run(config)["folder"]
    workspace = workspace_of(config)
    index = torch.from_numpy(
        np.concatenate([workspace.federation.partition.train(n) for n in range(workspace.federation.num_clients)])
    )
    logits = functional_call(workspace.model, load_file(f"{folder}/model.safetensors"), (workspace.images(index),)).logits
    rows = [
        r for r in read_rows(f"{folder}/metrics.csv") if (r["split"], r["metric"], r["round"]) == ("train", "accuracy", "3")
    ]
    assert float(rows[0]["value"]) == pytest.approx((logits.argmax(1) == workspace.y[index]).double().mean().item())


def test_flower_ends_before_ctrl_c_is_raised(monkeypatch):
    """It is not raised during Flower's threads, which would end the process. A second one is, or after a timeout."""

    def interrupt_run(again=False, seconds=60.0, error=None):
        stop, seen = threading.Event(), []
        monkeypatch.setattr(flower, "WRITE_SECONDS", seconds)
        with pytest.raises(KeyboardInterrupt), flower._stopped_by_signals(stop, verbose=True):
            signal.raise_signal(signal.SIGINT)
            seen.append(stop.is_set())
            if again:
                signal.raise_signal(signal.SIGINT)
            if seconds < 1:
                threading.Event().wait(20)
            seen.append("ended")
            if error is not None:
                raise error
        return seen

    before = signal.getsignal(signal.SIGINT)
    assert interrupt_run() == interrupt_run(error=RuntimeError("crashed")) == [True, "ended"]
    assert interrupt_run(again=True) == interrupt_run(seconds=0.2) == [True]
    with flower._stopped_by_signals(threading.Event(), verbose=True):
        pass
    with pytest.raises(RuntimeError, match="crashed"), flower._stopped_by_signals(threading.Event(), verbose=True):
        raise RuntimeError("crashed")
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        slow("local", signal.SIGINT),
        slow("ray", signal.SIGINT),
        slow("flower", signal.SIGINT),
        slow("ray", signal.SIGTERM),  # Ray takes this signal's handler
        slow("flower", signal.SIGTERM),
    ],
)
def test_ctrl_c_leaves_everything_written(tmp_path, engine, how):
    asked = f"engine={engine} num_rounds=100000 num_clients=8 eval_every=1 model=mlp output_dir={tmp_path}/run"
    command = [sys.executable, "main.py", *asked.split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    metrics = tmp_path / "run" / "metrics.csv"
    ends = time.monotonic() + 240
    while time.monotonic() < ends and not (metrics.exists() and metrics.read_text().count("\n") > 60):
        time.sleep(0.1)
    (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["rounds"] >= 5
    for name in ("model.safetensors", "accuracy.png", "participation.png", "partition.png", "config.yaml"):
        assert (tmp_path / "run" / name).stat().st_size > 0
