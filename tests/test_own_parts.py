"""Mistakes in a user's model, data set, partition, pattern or method: each gives one line with the expected form.

The right modules are those of docs/own-parts.md, which tests/test_docs.py runs unchanged. Here each has one mistake.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import resolve_and_try
from omegaconf import OmegaConf
from test_external_package import CLIENT, METHOD, RULE, write
from torchvision.datasets import FakeData

from contrafed.config.compose import compose_job
from contrafed.core.errors import UserError
from contrafed.data.federation import load_federation
from contrafed.data.images import make_images
from contrafed.data.participation import make_participation
from contrafed.report.runs import composition
from contrafed.server.base import strategy_class_of
from contrafed.training.base import LocalError
from contrafed.training.workspace import Workspace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs" / "generate"))
from blocks import blocks_of  # noqa: E402

PARTS = {"model": "small", "dataset": "stripes", "partition": "sorted_labels", "participation": "shifts"}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Return a folder with the files of docs/own-parts.md."""
    write(tmp_path / "parts" / "__init__.py", "")
    for block in blocks_of(ROOT / "docs" / "own-parts.md"):
        if block.title:
            write(tmp_path / block.title, block.text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("parts", "my_package")]:
        del sys.modules[name]


def change_part(home, group, old, new):
    path = home / "parts" / f"{PARTS[group]}.py"
    assert re.search(old, path.read_text(), re.S)
    path.write_text(re.sub(old, new, path.read_text(), flags=re.S))


def make_run(home, group, *overrides):
    chosen = (f"{group}={PARTS[group]}", "num_clients=4", "strategy=fedavg", *overrides)
    return resolve_and_try(OmegaConf.to_container(compose_job(list(chosen), home / "yamls"), resolve=True))


def read_message(found):
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize(
    ("group", "old", "new", "message"),
    [
        (
            "model",
            r"def build",
            "def make",
            "model=small: parts.small must define build(config, in_channels, image_size, num_classes)",
        ),
        (
            "model",
            r"config, in_channels, image_size, num_classes\):",
            "config, num_classes):",
            "model=small: parts.small must define build(config, in_channels, image_size, num_classes)",
        ),
        (
            "model",
            r"SplitModel\(encoder, .*",
            "nn.Sequential(encoder)\n",
            "model=small: parts.small.build must return a contrafed.core.split_model.SplitModel, got Sequential",
        ),
        (
            "model",
            r"Stages\(\[first, (.*?)\], .*?\)\n",
            r"nn.Sequential(first, first_tail, \1)\n",
            "model=small: parts.small.build must return a contrafed.core.split_model.SplitModel "
            "whose encoder is a contrafed.core.split_model.Stages, got Sequential",
        ),
        (
            "model",
            r"width, num_classes\)\)",
            "width, 3))",
            "model=small: parts.small.build must return a contrafed.core.split_model.SplitModel "
            "with 10 outputs (num_classes), got 3",
        ),
        (
            "model",
            r"nn.ReLU\(\), nn.MaxPool",
            "nn.BatchNorm2d(config.channels, track_running_stats=False), nn.MaxPool",
            "model=small: encoder.tails.0.0 (BatchNorm2d) has no running statistics, so that answers depend on which images "
            "are evaluated together. Fix: track_running_stats=True",
        ),
        (
            "model",
            r"nn.ReLU\(\), nn.MaxPool",
            "nn.Dropout(0.2), nn.MaxPool",
            "model=small: parts.small.build must return a contrafed.core.split_model.SplitModel without layers of dropout, "
            "got encoder.tails.0.0; give SplitModel its dropout=RATE",
        ),
        (
            "model",
            r"\[first_tail, nn.ReLU\(\)\]",
            "[first_tail]",
            "model=small cannot be built for images of 3x32x32: ValueError: Stages takes a tail for each stage, "
            "got 2 stages and 1 tails; nn.Identity() does nothing ({home}/parts/small.py, line 22)",
        ),
        (
            "model",
            r"nn.Identity\(\), nn.Linear\(config.width, num_classes\)",
            "nn.Identity(), nn.Sequential(nn.Linear(config.width, num_classes))",
            "model=small cannot be built for images of 3x32x32: TypeError: a SplitModel's classifier is an nn.Linear, "
            "got Sequential; layers before it are the projector ({home}/parts/small.py, line 23)",
        ),
        (
            "model",
            r"nn.Identity\(\), nn.Linear\(config.width, num_classes\)",
            "nn.Linear(config.width, config.width), nn.Linear(config.width, num_classes)",
            "model=small cannot be built for images of 3x32x32: TypeError: a SplitModel's projector is an nn.Sequential, "
            "or an nn.Identity for none, got Linear ({home}/parts/small.py, line 23)",
        ),
        (
            "model",
            r"config.width, num_classes\)\)",
            'config.width, num_classes), 0.5, ("classifier", "projector.1"))',
            "model=small cannot be built for images of 3x32x32: ValueError: dropped must name the classifier, and may name "
            "nothing else ({home}/parts/small.py, line 23)",
        ),
        (
            "model",
            r"first = nn",
            "first = None.parts",
            "model=small cannot be built for images of 3x32x32: AttributeError: 'NoneType' object has no attribute 'parts' "
            "({home}/parts/small.py, line 19)",
        ),
        (
            "model",
            r"nn.Linear\(flat, config.width\)",
            "nn.LazyLinear(config.width)",
            "model=small: parts.small.build must return a contrafed.core.split_model.SplitModel whose layers know their sizes, "
            "got encoder.stages.1.weight without; contrafed.core.split_model.features_of counts them",
        ),
        (
            "model",
            r"@dataclass\(frozen=True\)",
            "",
            "model=small: parts.small has no dataclass Config, which names its settings",
        ),
        ("dataset", r"def load", "def read", "dataset=stripes: parts.stripes must define load(config, name)"),
        (
            "dataset",
            r"\(Common\)",
            "",
            "dataset=stripes: Config of parts.stripes must inherit Common of contrafed.data.images",
        ),
        ("partition", r"def split", "def cut", "partition=sorted_labels: parts.sorted_labels must define split(config, draw)"),
        (
            "partition",
            r"\(Common\)",
            "",
            "partition=sorted_labels: Config of parts.sorted_labels must inherit Common of contrafed.data.partition",
        ),
        (
            "participation",
            r"\(Selection\)",
            "",
            "participation=shifts: Config of parts.shifts must inherit Selection of contrafed.data.participation",
        ),
        (
            "participation",
            r"\(Participation\)",
            "",
            "parts.shifts must define exactly one class that inherits contrafed.data.participation.Participation, found 0",
        ),
        (
            "participation",
            r"    everyone = False\n",
            "",
            "participation=shifts: Shifts has an `available` and must say `everyone = False`",
        ),
    ],
)
def test_code_that_lacks_something_is_one_line_before_anything_is_loaded(home, group, old, new, message):
    change_part(home, group, old, new)
    with pytest.raises(UserError) as found:
        make_run(home, group)
    assert read_message(found) == message.replace("{home}", str(home))


@pytest.mark.parametrize(
    ("group", "old", "new", "message"),
    [
        (
            "dataset",
            r"return make_images\(.*",
            "return x, y\n",
            "dataset=stripes: parts.stripes.load must return ImageData, got tuple",
        ),
        ("partition", r"cuts\[:-1\]", "cuts[:-2]", "split must return a list of 4 index arrays, one a client; got 3 parts"),
        ("partition", r"return np.split.*?\n", "return order\n", "a list of 4 index arrays, one a client; got ndarray"),
        ("partition", r"return np.split\(order,", "return np.split(order / 2,", "whole numbers; client 0 has float64 ("),
        ("partition", r"return np.split.*?\n", "return [[0], [1], [2], [3]]\n", "whole numbers; client 0 has a list"),
        ("partition", r"return np.split\(order,", "return np.split(order + 9999,", "positions in draw.y, 0.."),
        (
            "partition",
            r"return np.split\(order,",
            "return np.split(0 * order,",
            "split must return no position twice; client 0 has 165, of which 1 distinct",
        ),
        (
            "partition",
            r"return np.split.*?\n",
            "return [order[:0], order[:99], order[99:200], order[198:300]]\n",
            "split must return no position twice; clients 2 and 3 share 2; define lazy where clients are to share",
        ),
    ],
)
def test_what_code_returns_is_looked_at_when_data_are_loaded(home, group, old, new, message):
    assert load_federation(make_run(home, group).client).num_clients == 4
    for name in [name for name in sys.modules if name.split(".")[0] == "parts"]:
        del sys.modules[name]
    change_part(home, group, old, new)
    with pytest.raises(UserError) as found:
        load_federation(make_run(home, group).client)
    assert message in read_message(found)


@pytest.mark.parametrize(
    ("old", "new", "got"),
    [
        (r"return np.arange.*?== shift", "return np.arange(3) == shift", "got bool (3,)"),
        (r"return np.arange.*?== shift", "return np.arange(4)", "got int64 (4,)"),
        (r"return np.arange.*?== shift", "return [True] * 4", "got list (4,)"),
    ],
)
def test_a_pattern_that_returns_no_marks_is_one_line(home, old, new, got):
    change_part(home, "participation", old, new)
    with pytest.raises(UserError) as found:
        make_run(home, "participation")
    assert read_message(found) == f"Shifts.available must return (4,) bool, {got}"


def test_a_channel_axis_that_comes_first_is_named():
    y, test = np.arange(20) % 2, np.arange(20) % 5 == 0
    with pytest.raises(UserError) as found:
        make_images(np.zeros((20, 3, 32, 40), np.uint8), y, test)
    wanted = "images must be at least 8x8 with 1 or 3 channels"
    assert read_message(found) == f"{wanted}, got 3x32 with 40; channels come last: x.transpose(0, 2, 3, 1)"
    assert make_images(np.zeros((20, 3, 32, 40), np.uint8).transpose(0, 2, 3, 1), y, test).x.shape == (20, 3, 32, 40)
    for shape in ((20, 3, 32, 3), (20, 32, 32, 5)):
        with pytest.raises(UserError, match=r"got \d+x32 with \d$"):
            make_images(np.zeros(shape, np.uint8), y, test)


def piece(name):
    """Return the block of docs/own-parts.md that defines a function without a file."""
    (text,) = [b.text for b in blocks_of(ROOT / "docs" / "own-parts.md") if f"def {name}(" in b.text and not b.title]
    return text


def test_torchs_data_sets_are_stacked():
    names = {"np": np, "make_images": make_images}
    exec(piece("stacked"), names)
    sets = [FakeData(size, (3, 12, 16), num_classes=3, random_offset=100 * size) for size in (30, 10)]
    data = names["stacked"](*sets)
    assert data.x.shape == (40, 3, 12, 16)
    assert data.test.tolist() == [False] * 30 + [True] * 10
    assert data.y.tolist() == [int(part[i][1]) for part in sets for i in range(len(part))]
    assert (data.x[31].permute(1, 2, 0).numpy() == np.asarray(sets[1][1][0])).all()


def test_clients_share_examples_by_lazy(home):
    change_part(home, "partition", r"def split.*?\n\n\n", f"{piece('lazy')}\n\n")
    run = make_run(home, "partition", "num_clients=3").client
    partition = load_federation(run).partition
    parts = [set(partition.train(client).tolist()) for client in range(3)]
    common = parts[0] & parts[1]
    assert len(common) == len(set.union(*parts)) // 20
    assert parts[0] & parts[2] == parts[1] & parts[2] == common
    assert partition.test_sizes.tolist() == [0, 0, 0]
    with pytest.raises(UserError, match="has no partition.test_fraction"):
        load_federation(make_run(home, "partition", "num_clients=3", "partition.test_fraction=0.2").client)


@pytest.mark.parametrize(
    ("returned", "got"), [("train", "got list"), ("Partition(train[1:], train[1:], y, num_classes)", "got one of 3")]
)
def test_what_lazy_returns_is_looked_at_too(home, returned, got):
    text = piece("lazy").replace("return Partition(train, [pool[:0]] * num_clients, y, num_classes)", f"return {returned}")
    change_part(home, "partition", r"def split.*?\n\n\n", f"{text}\n\n")
    with pytest.raises(UserError) as found:
        load_federation(make_run(home, "partition").client)
    wanted = "parts.sorted_labels.lazy must return a contrafed.data.partition.Partition of 4 clients"
    assert read_message(found) == f"partition=sorted_labels: {wanted}, {got}"


def test_what_explicit_returns_is_looked_at_too(home):
    body = "held = np.arange(8).reshape(4, 2)\n    return list(held), list(held[:, 1:])"
    change_part(home, "partition", r"def split.*?\n\n\n", f"def explicit(config, test, num_clients):\n    {body}\n\n\n")
    with pytest.raises(UserError, match="explicit must return no position twice; client 0 has 3, of which 2 distinct"):
        load_federation(make_run(home, "partition").client)


def test_a_backbone_is_one_stage_and_dropout_a_rate(home):
    backbone = (
        "def Backbone(channels):\n"
        "    return nn.Sequential(nn.Conv2d(channels, 128, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n\n\n"
    )
    change_part(home, "model", r"def build.*", backbone + piece("build"))
    model = Workspace(make_run(home, "model", "model.width=32").client).model  # a new width, as outlines are cached
    assert (model.embedding_size, model.dropout, model.dropped) == (128, 0.2, ("classifier",))


def test_both_halves_in_one_file_are_one_method_with_its_plain_name(home):
    config = CLIENT.replace("class Config:", "class Config(Weights):").replace("scale: Ann", "share: float\n    scale: Ann")
    rule = RULE[RULE.index("class MyRule") :]
    write(home / "my_package" / "__init__.py", "")
    write(home / "my_package" / "my_method.py", f"from contrafed.strategies.fedavg import FedAvg, Weights\n{config}\n\n{rule}")
    write(home / "yamls" / "strategy" / "mine.yaml", METHOD.replace("server: my_package.my_rule\n", ""))
    run = resolve_and_try(OmegaConf.to_container(compose_job(["strategy=mine"], home / "yamls"), resolve=True))
    assert strategy_class_of(run.server).__name__ == "MyRule"
    assert run.server.config.share == run.client.strategy.config.share == 0.5
    assert composition(run.composed["strategy"]) == "mine"


def test_shifts_are_as_the_page_says(home):
    pattern = make_participation(make_run(home, "participation").participation, None, 4, seed=0)
    assert [pattern.participants(t).tolist() for t in (1, 2, 3)] == [[0, 2], [1, 3], [0, 2]]


@pytest.mark.parametrize("group", ["model", "dataset"])
def test_the_command_says_it_in_one_line_too(home, group):
    change_part(home, group, r"def (build|load)", "def nothing")
    asked = [sys.executable, str(ROOT / "main.py"), "--config-dir=yamls", f"{group}={PARTS[group]}", "engine=local"]
    env = os.environ | {"PYTHONPATH": str(home)}
    done = subprocess.run(asked, cwd=home, capture_output=True, text=True, env=env, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"error: {group}=\w+: parts.\w+ must define \w+\(.*\)\n", done.stderr)


def client_of(home, body):
    """Return the client of two partitions whose method has this body, and its received tensors."""
    write(home / "my_package" / "__init__.py", "")
    write(home / "my_package" / "my_method.py", CLIENT.split("    def loss")[0] + body)
    yaml = METHOD.replace("_local@local,", "_local@local, server: fedavg,").replace("server: my_package.my_rule\n", "")
    write(home / "yamls" / "strategy" / "mine.yaml", yaml.replace("share: 0.5\n", ""))
    chosen = ["strategy=mine", "num_clients=2", "participation=full", "model=mlp", "partition.test_fraction=0.2"]
    run = resolve_and_try(OmegaConf.to_container(compose_job(chosen, home / "yamls"), resolve=True))
    workspace = Workspace(run.client)
    received = {f"model/{name}": value for name, value in workspace.initial.items()}
    return lambda clients: (workspace.client_class(workspace, clients), [received] * len(clients))


LOSS = "    def loss(self, params, batch, loss_inputs):\n"
TASK = "self.task_loss(self.forward(params, batch), batch)"


@pytest.mark.parametrize(
    ("body", "clients", "message"),
    [
        (f"{LOSS}        return {TASK}\n", [0], "loss must return a dictionary with 'loss'"),
        (f"{LOSS}        return {TASK}\n", [0, 1], "loss must return a dictionary with 'loss'"),
        (f"{LOSS}        return {{'task': {TASK}}}\n", [0], "loss must return a dictionary with 'loss'"),
        (f"{LOSS}        return {{'task': {TASK}}}\n", [0, 1], "loss must return a dictionary with 'loss'"),
        (f"{LOSS}        {TASK}\n", [0], "loss must return a dictionary with 'loss'"),  # of two, torch's vmap says it
        (
            "    def local_update(self, stack):\n        self.train(stack)\n",
            [0, 1],
            "local_update must return what is sent: return self.make_upload(stack)",
        ),
    ],
)
def test_a_method_that_returns_something_else_is_told_which_function_and_where(home, body, clients, message):
    client, received = client_of(home, body)(clients)
    with pytest.raises(LocalError) as found:
        client.update(received, 1)
    line = 1 + next(i for i, text in enumerate(CLIENT.splitlines()) if "def loss" in text)
    line += body[: body.index(f"def {message.split()[0]}")].count("\n")
    assert read_message(found).endswith(f"ReturnError: MyClient.{message} (my_package/my_method.py, line {line})")
    assert read_message(found).startswith(f"client {', '.join(map(str, client.clients))}, round 1, step ")


def test_models_to_be_evaluated_by_must_be_returned_too(home):
    client, received = client_of(home, "    def eval_models(self, stack):\n        self.make_upload(stack)\n")([0, 1])
    with pytest.raises(LocalError, match=r"ReturnError: MyClient.eval_models must return a dictionary with 'model' \(my_pack"):
        client.evaluate_clients(received, 1)
