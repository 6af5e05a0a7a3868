"""Bytes of messages: by count, as Flower serialises them, and by the papers' formulas."""

import io
import math

import numpy as np
import pytest
from helpers import Schedule, Through, config_of, read_rows, run_strategy, workspace_of
from reported import write_run
from tiny import TINY_RUN

from contrafed import run
from contrafed.core import registry
from contrafed.core.build import build_model
from contrafed.core.client_run import choose, client_run_of
from contrafed.report import results, tables
from contrafed.report.runs import find, read
from contrafed.training.base import Client
from contrafed.training.traffic import count_scalars
from contrafed.training.workspace import client_class_of

# Content that the formulas lack, down and up: validity and counts, one number per class, FedProc's a_t, whether
# there is a mixed head for FedPAC, the two accuracies of FedPPO.
EXTRA_NUMBERS = dict.fromkeys(("fedproto", "fedtgp", "fedcrl", "fedcosr", "mpfedcon"), (10, 10))
EXTRA_NUMBERS |= {"fedgh": (0, 10), "fedproc": (11, 10), "fedpac": (11, 10), "fedppo": (0, 2), "fedas": (0, 1)}
EXTRA_NUMBERS["amplified_scaffold"] = 1, 0  # the period


def payload(record):
    """Return the bytes of a record's arrays as Flower serialises them, without the headers of the .npy files."""
    total = 0
    for array in record.values():
        file = io.BytesIO(array.data)
        version = np.lib.format.read_magic(file)
        getattr(np.lib.format, f"read_array_header_{version[0]}_0")(file)
        total += len(array.data) - file.tell()
    return total


def measure_bytes(folder):
    """Return the bytes of a received message and of an accepted reply in a round."""
    run = read(folder, folder.name)
    return run.number("bytes_down_per_client"), run.number("bytes_up_per_client")


@pytest.mark.parametrize(
    ("name", "own"),
    [
        *((name, "") for name in registry.choices("strategy")),
        *((name, "strategy.head=projector_classifier") for name in ("fedper", "fedrep", "fedbabu")),
        *((name, "strategy.separate=false") for name in ("fedcrl", "fedcosr")),
    ],
)
def test_bytes_by_count_equal_what_is_serialised_and_the_papers_formula(name, own):
    """In scalars per client and round: both directions, plus the content that formulas leave out."""
    seen = {"down": 0, "up": 0}

    def count(messages, replies):
        seen["up"] += sum(payload(reply.content["arrays"]) for reply in replies)
        seen["down"] += sum(payload(message.content["arrays"]) for message in messages)
        return replies

    more = [own] if own else []
    config = config_of(f"strategy={name}", *more, "num_clients=4", "model=mlp", "model.hidden=[12]", "model.projection=[9]")
    config["strategy"]["local"] |= {"epochs": None, "iterations": 1}
    workspace = workspace_of(config)
    _, strategy = run_strategy(workspace, config, Schedule([range(3)]), 1, wrap=lambda grid: Through(grid, count))
    assert (strategy.round.bytes_down, strategy.round.bytes_up) == (seen["down"], seen["up"])
    by_formula = count_scalars(workspace.client_class, workspace.model, workspace.config)
    one_way = [sum(pair) for pair in zip(by_formula, EXTRA_NUMBERS.get(name, (0, 0)), strict=True)]
    clients = len(strategy.round.participants)  # three, from which FedPPO selects
    assert clients
    assert [seen["down"], seen["up"]] == [clients * 4 * scalars for scalars in one_way]


def test_a_formula_by_hand_and_none_for_messages_of_ones_own():
    """Encoder 8 x 8 x 12 + 12, projector 12 x 9 + 9, classifier 9 x 10 + 10. A subclass with other messages has no formula."""
    model = workspace_of(config_of("model=mlp", "model.hidden=[12]", "model.projection=[9]")).model
    encoder, projector, classifier = 64 * 12 + 12, 12 * 9 + 9, 9 * 10 + 10
    whole = encoder + projector + classifier

    def count_mine(**attributes):
        return count_scalars(type("Mine", (Client,), attributes), model, None)

    assert count_mine() == (whole, whole)
    assert count_mine(shared=("classifier",)) == (classifier, classifier)
    assert count_mine(traffic=("theta omega", "pi v h"), message_spec=None) == (whole + 10 * 9, classifier + 1 + 10 * 9)
    assert count_mine(message_spec=None) is None
    assert count_mine(traffic=None) is None
    assert count_mine(shared=(), traffic=("", "")) == (0, 0)


def test_a_client_sends_as_much_where_replies_are_lost(tmp_path):
    """If half of the replies are lost, summary, log and tables still report the bytes of one reply."""
    lossy = ("strategy=fedcrl", "num_clients=4", "num_rounds=4", "participation=full", "participation.loss_rate=0.5")
    summary = run(config_of(*TINY_RUN, *lossy, "engine=local", f"output_dir={tmp_path / 'a'}"))
    lost = [float(row["value"]) for row in read_rows(tmp_path / "a" / "metrics.csv") if row["metric"] == "lost"]
    assert sum(lost) > 0
    assert summary["bytes_down_per_client"] == summary["bytes_up_per_client"]
    assert summary["bytes_up_by_formula"] == summary["bytes_up_per_client"] - 4 * 10
    assert summary["bytes_up"] == (4 * 4 - sum(lost)) * summary["bytes_up_per_client"]
    assert measure_bytes(tmp_path / "a") == (summary["bytes_down_per_client"], summary["bytes_up_per_client"])


def test_a_log_alone_tells_what_a_client_sends(tmp_path, expect_error):
    """One of two replies was lost in the second round. Rejected evaluations are not lost replies."""
    write_run(tmp_path / "a", replies=(2, 1, 2), system={"replies_rejected": 3})
    assert measure_bytes(tmp_path / "a") == (2 * 2**20, 2**20)
    (found,) = find([tmp_path])
    results.keep([found], tmp_path / "results", "a")
    (stored,) = results.load(tmp_path / "results" / "a.csv")
    assert tables.runs_table([stored], "t").rows == tables.runs_table([found], "t").rows
    assert "3.000" in tables.runs_table([stored], "t").rows[0]
    assert all(map(math.isnan, measure_bytes(write_run(tmp_path / "b", (0.1,)))))  # no client participated
    with expect_error():
        measure_bytes(tmp_path / "c")


def test_the_papers_network_sends_what_the_paper_counts():
    """FedCRL on CIFAR-10 sends 519,808 scalars in both directions, 2 C fewer than FedAvg, plus 2 C of counts and validity."""
    model = build_model(choose("model", config_of("model=cnn")["model"]), 3, (32, 32), 10, 0)
    counts = {}
    for name in ("fedavg", "fedcrl"):
        strategy = client_run_of(config_of(f"strategy={name}")).strategy
        messages = client_class_of(strategy).message_spec(model, strategy.config)
        counts[name] = sum(math.prod(shape) for shapes in messages for shape in shapes.values())
    assert counts == {"fedavg": 519_828, "fedcrl": 519_808 + 2 * 10}
