"""Phases without a step and clients without an example: nothing happens, alone as in a stack."""

import json

import numpy as np
import pytest
import torch
from helpers import config_of, slow, workspace_of

from contrafed import compose, run
from contrafed.training.batches import Batches

SMALL_RUN = (
    "num_clients=4", "model=mlp", "model.hidden=[8]", "participation=full", "num_rounds=2", "engine=local", "tracker=none",
)  # fmt: skip
NO_STEP = {
    "fedbabu": "strategy.tune_epochs=0", "fedavg_ft": "strategy.tune_epochs=0", "fedrep": "strategy.head_epochs=0",
    "mpfedcon": "strategy.head_epochs=0", "fedpac": "strategy.head_epochs=0",
}  # fmt: skip


@pytest.mark.parametrize("method", [name if name in ("fedbabu", "mpfedcon") else slow(name) for name in NO_STEP])
def test_a_phase_without_a_step_may_have_augmentation(tmp_path, method):
    how = (f"strategy={method}", NO_STEP[method], "strategy.local.augment=[crop,flip]", "dataset.merge_splits=true", *SMALL_RUN)
    summary = run(compose(*how, f"output_dir={tmp_path}"))
    assert (summary["failures"], summary["replies_rejected"]) == (0, 0)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [row for row in rows if row.startswith("2,personal,test,accuracy,")]


def test_a_pass_over_no_example_sums_to_zero_alone_as_in_a_stack():
    workspace = workspace_of(config_of("strategy=fedproto", "num_clients=4", "model=mlp"), dtype=torch.float64)
    none, some = np.zeros(0, np.int64), workspace.federation.partition.train(0)
    assert Batches.one_pass(workspace, [none], padded=True).at(0, 1).mask.tolist() == [[0]]
    passes = [Batches.one_pass(workspace, rows, padded=True) for rows in ([none, none], [none, some])]
    assert [one.counts.sum().item() for one in passes] == [0, len(some)]


@pytest.mark.parametrize("method", [slow("fedcrl"), slow("fedproto"), "mpfedcon", slow("fedppo")])
def test_a_client_that_only_tests_is_evaluated_after_its_local_work_alone_as_in_a_stack(tmp_path, method):
    lists = np.arange(400).reshape(4, 100)
    train, test = [part[:80].tolist() for part in lists], [part[80:].tolist() for part in lists]
    file = tmp_path / "clients.json"
    file.write_text(json.dumps({"train": [train[0], [], *train[2:]], "test": test}))
    how = (
        "evaluate_after=local_training", "partition=file", f"partition.path={file}", "partition.min_client_size=0",
        "eval_clients=true",
    )  # fmt: skip
    rows = []
    for size in (1, 4):
        folder = tmp_path / str(size)
        sizes = (f"engine.stack_size={size}", f"output_dir={folder}")
        summary = run(compose(f"strategy={method}", *how, "dataset.merge_splits=true", *SMALL_RUN, *sizes))
        assert summary["failures"] == 0
        rows.append([row.split(",")[1] for row in (folder / "clients.csv").read_text().splitlines() if ",accuracy," in row])
    assert rows[0] == rows[1]
    assert "1" in rows[0]
