"""Mistakes in a user's model, data set, partition, pattern or method: each gives one line with the expected form.

The right modules are those of docs/own-parts.md, which tests/test_docs.py runs unchanged. Here each has one mistake.
"""

import contextlib
import re
import sys

import numpy as np
import pytest
from helpers import config_of, resolve_and_try
from messages import ROOT
from omegaconf import OmegaConf
from test_external_package import CLIENT, METHOD, RULE, write
from torch import nn
from torchvision.datasets import FakeData

from contrafed.config.compose import compose_job, composition
from contrafed.config.run_config import resolve
from contrafed.core.build import build_model
from contrafed.core.client_run import choose
from contrafed.data.checks import check_lazy
from contrafed.data.federation import load_federation
from contrafed.data.images import make_images
from contrafed.data.participation import Participation, make_participation
from contrafed.data.partition import Partition
from contrafed.models import mlp
from contrafed.partitions.participation import full
from contrafed.partitions.partitioners import iid
from contrafed.server.base import strategy_class_of
from contrafed.training.base import LocalError
from contrafed.training.workspace import Workspace

sys.path.insert(0, str(ROOT / "docs" / "generate"))
from blocks import blocks_of

PARTS = {"model": "small", "dataset": "stripes", "partition": "sorted_labels", "participation": "shifts"}


@pytest.fixture
def home(on_path):
    """Return a folder with the files of docs/own-parts.md."""
    write(on_path / "parts" / "__init__.py", "")
    for block in blocks_of(ROOT / "docs" / "own-parts.md"):
        if block.title:
            write(on_path / block.title, block.text)
    return on_path


def change_part(home, group, old, new):
    path = home / "parts" / f"{PARTS[group]}.py"
    assert re.search(old, path.read_text(), re.S)
    path.write_text(re.sub(old, new, path.read_text(), flags=re.S))


def make_run(home, group, *overrides):
    chosen = (f"{group}={PARTS[group]}", "num_clients=4", "strategy=fedavg", *overrides)
    return resolve_and_try(OmegaConf.to_container(compose_job(list(chosen), home / "yamls"), resolve=True))


LINEAR_HEAD = r"nn.Identity\(\), nn.Linear\(config.width, num_classes\)"
RELU = r"nn.ReLU\(\), nn.MaxPool"


@pytest.mark.parametrize(
    ("group", "old", "new"),
    [
        ("model", r"def build", "def make"),
        ("model", r"config, in_channels, image_size, num_classes\):", "config, num_classes):"),
        ("model", r"SplitModel\(encoder, .*", "nn.Sequential(encoder)\n"),
        ("model", r"Stages\(\[first, (.*?)\], .*?\)\n", r"nn.Sequential(first, first_tail, \1)\n"),
        ("model", r"width, num_classes\)\)", "width, 3))"),
        ("model", RELU, "nn.BatchNorm2d(config.channels, track_running_stats=False), nn.MaxPool"),
        ("model", RELU, "nn.Dropout(0.2), nn.MaxPool"),
        ("model", r"\[first_tail, nn.ReLU\(\)\]", "[first_tail]"),
        ("model", LINEAR_HEAD, "nn.Identity(), nn.Sequential(nn.Linear(config.width, num_classes))"),
        ("model", LINEAR_HEAD, "nn.Linear(config.width, config.width), nn.Linear(config.width, num_classes)"),
        ("model", r"config.width, num_classes\)\)", 'config.width, num_classes), 0.5, ("classifier", "projector.1"))'),
        ("model", r"first = nn", "first = None.parts"),
        ("model", r"nn.Linear\(flat, config.width\)", "nn.LazyLinear(config.width)"),
        ("model", r"@dataclass\(frozen=True\)", ""),
        ("dataset", r"def load", "def read"),
        ("dataset", r"\(Common\)", ""),
        ("partition", r"def split", "def cut"),
        ("partition", r"\(Common\)", ""),
        ("participation", r"\(Selection\)", ""),
        ("participation", r"\(Participation\)", ""),
        ("participation", r"    everyone = False\n", ""),
        ("participation", r"return np.arange.*?== shift", "return np.arange(3) == shift"),
        ("participation", r"return np.arange.*?== shift", "return np.arange(4)"),
        ("participation", r"return np.arange.*?== shift", "return [True] * 4"),
    ],
)
def test_code_that_lacks_something_is_one_line_before_anything_is_loaded(home, expect_error, group, old, new):
    change_part(home, group, old, new)
    with expect_error() as found:
        make_run(home, group)
    assert found.value.key in (group, "parts.shifts", "Shifts.available")


@pytest.mark.parametrize(
    "line",
    [
        'raise ValueError("only grey images")',
        'raise UserError("model.channels: only for grey images")',
        "assert in_channels == 1",
        "{1: 8}[in_channels]",
    ],
)
def test_a_network_for_other_images_than_a_sweep_assumes_is_left_to_its_job(home, expect_error, line):
    change_part(
        home, "model", "    first = nn", f"    from contrafed import UserError\n    if in_channels == 3: {line}\n    first = nn"
    )
    model = make_run(home, "model").client.model
    assert build_model(model, 1, (8, 8), 10, 0).num_classes == 10
    with expect_error():
        build_model(model, 3, (32, 32), 10, 0)


@pytest.mark.parametrize(
    ("group", "old", "new"),
    [
        ("dataset", r"return make_images\(.*", "return x, y\n"),
        ("partition", r"cuts\[:-1\]", "cuts[:-2]"),
        ("partition", r"return np.split.*?\n", "return order\n"),
        ("partition", r"return np.split\(order,", "return np.split(order / 2,"),
        ("partition", r"return np.split.*?\n", "return [[0], [1], [2], [3]]\n"),
        ("partition", r"return np.split\(order,", "return np.split(order + 9999,"),
        ("partition", r"return np.split\(order,", "return np.split(0 * order,"),
        ("partition", r"return np.split.*?\n", "return [order[:0], order[:99], order[99:200], order[198:300]]\n"),
    ],
)
def test_what_code_returns_is_looked_at_when_data_are_loaded(home, expect_error, group, old, new):
    assert load_federation(make_run(home, group).client).num_clients == 4
    for name in [name for name in sys.modules if name.split(".")[0] == "parts"]:
        del sys.modules[name]
    change_part(home, group, old, new)
    with expect_error(group):
        load_federation(make_run(home, group).client)


def test_a_channel_axis_that_comes_first_is_named(expect_error):
    y, test = np.arange(20) % 2, np.arange(20) % 5 == 0
    for shape in ((20, 3, 32, 40), (20, 3, 32, 3), (20, 32, 32, 5)):
        with expect_error("images"):
            make_images(np.zeros(shape, np.uint8), y, test)
    assert make_images(np.zeros((20, 3, 32, 40), np.uint8).transpose(0, 2, 3, 1), y, test).x.shape == (20, 3, 32, 40)


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


def test_clients_share_examples_by_lazy(home, expect_error):
    change_part(home, "partition", r"def split.*?\n\n\n", f"{piece('lazy')}\n\n")
    partition = load_federation(make_run(home, "partition", "num_clients=3").client).partition
    parts = [set(partition.train(client).tolist()) for client in range(3)]
    common = parts[0] & parts[1]
    assert len(common) == len(set.union(*parts)) // 20
    assert parts[0] & parts[2] == parts[1] & parts[2] == common
    assert partition.test_sizes.tolist() == [0, 0, 0]
    with expect_error("partition"):
        load_federation(make_run(home, "partition", "num_clients=3", "partition.test_fraction=0.2").client)


@pytest.mark.parametrize("returned", ["train", "Partition(train[1:], train[1:], y, num_classes)"])
def test_what_lazy_returns_is_looked_at_too(home, expect_error, returned):
    text = piece("lazy").replace("return Partition(train, [pool[:0]] * num_clients, y, num_classes)", f"return {returned}")
    change_part(home, "partition", r"def split.*?\n\n\n", f"{text}\n\n")
    with expect_error("partition"):
        load_federation(make_run(home, "partition").client)


def test_what_explicit_returns_is_looked_at_too(home, expect_error):
    body = "held = np.arange(8).reshape(4, 2)\n    return list(held), list(held[:, 1:])"
    change_part(home, "partition", r"def split.*?\n\n\n", f"def explicit(config, test, num_clients):\n    {body}\n\n\n")
    with expect_error("partition"):
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


CHAIN = """
    def prepare(self, class_proportions):
        self.rng = {generator}
        self.on = np.zeros(self.num_clients, dtype=bool)

    def available(self, server_round):
        {step}
        return self.on
"""
STEP = "self.on = self.on ^ (self.rng.random(self.num_clients) < 0.5)"


@pytest.mark.parametrize(
    ("generator", "step"),
    [
        ("np.random.default_rng(self.seed)", STEP),
        ("np.random.default_rng()", "self.on = self.rng.random(self.num_clients) < 0.5"),
        ("np.random", STEP),
    ],
    ids=["a generator", "no seed", "the global generator"],
)
def test_a_pattern_has_the_same_clients_in_a_round_that_is_asked_for_alone(home, expect_error, generator, step):
    """A resumed run asks for its first round alone."""
    change_part(home, "participation", r"    def available.*?\n\n", CHAIN.format(generator=generator, step=step))
    with expect_error("Shifts.available"):
        make_run(home, "participation", "num_clients=40")


def test_a_pattern_may_compute_earlier_rounds_again(home):
    change_part(home, "participation", r"class Shifts.*", piece("prepare"))
    pattern = make_participation(make_run(home, "participation").participation, None, 40, seed=0)
    rounds = [pattern.participants(t).tolist() for t in (1, 2, 3, 2, 1)]
    assert rounds[:2] == rounds[:2:-1]
    assert rounds[0] != rounds[1] != rounds[2]


def test_a_pattern_may_end_with_the_run(home):
    change_part(home, "participation", r"return np.arange.*?== shift", "return np.ones((3, 4), dtype=bool)[server_round - 1]")
    assert make_run(home, "participation", "num_rounds=3").num_rounds == 3


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


LOSS = "    def loss(self, params, batch, loss_inputs):\n        "
TASK = "self.task_loss(self.forward(params, batch), batch)"


@pytest.mark.parametrize(
    ("body", "clients"),
    [
        (f"{LOSS}return {TASK}\n", [0]),
        (f"{LOSS}return {TASK}\n", [0, 1]),
        (f"{LOSS}return {{'task': {TASK}}}\n", [0]),
        (f"{LOSS}return {{'task': {TASK}}}\n", [0, 1]),
        (f"{LOSS}{TASK}\n", [0]),  # of two, torch's vmap says it
        ("    def local_update(self, stack):\n        self.train(stack)\n", [0, 1]),
    ],
)
def test_a_method_that_returns_something_else_is_told_which_function_and_where(home, expect_error, body, clients):
    client, received = client_of(home, body)(clients)
    with expect_error(kind=LocalError) as found:
        client.update(received, 1)
    line = 1 + next(i for i, text in enumerate(CLIENT.splitlines()) if "def loss" in text)
    assert str(found.value).endswith(f"(my_package/my_method.py, line {line})")
    assert str(found.value).startswith(f"client {', '.join(map(str, client.clients))}, round 1, step ")


def test_models_to_be_evaluated_by_must_be_returned_too(home, expect_error):
    client, received = client_of(home, "    def eval_models(self, stack):\n        self.make_upload(stack)\n")([0, 1])
    with expect_error(kind=LocalError):
        client.evaluate_clients(received, 1)


def another_part(model):
    model.head = nn.Linear(2, 2)


def tie_projector(model):
    model.projector = nn.Sequential(model.classifier)


def fixed(model):
    model.classifier.bias.requires_grad_(False)


@pytest.mark.parametrize("change", [another_part, tie_projector, fixed])
def test_a_model_has_three_parts_that_train(monkeypatch, expect_error, change):
    inner = mlp.build

    def built(*given):
        change(model := inner(*given))
        return model

    monkeypatch.setattr(mlp, "build", built)
    with expect_error("model"):
        build_model(choose("model", config_of("model=mlp")["model"]), 1, (8, 8), 10, 0)


@pytest.mark.parametrize(
    "functions",
    [
        {"everyone": False},
        {"everyone": False, "availible": lambda self, server_round: np.zeros(2, bool)},
        {"__init__": lambda self, *given: None},  # does not call the other
    ],
)
def test_a_pattern_says_who_is_there_and_calls_the_init_that_it_replaces(monkeypatch, expect_error, functions):
    mine = type("Mine", (Participation,), functions | {"__module__": full.__name__})
    (own,) = (n for n, v in vars(full).items() if isinstance(v, type) and issubclass(v, Participation) and v != Participation)
    monkeypatch.setattr(full, own, mine)
    choice = choose("participation", config_of("participation=full")["participation"])
    with expect_error("participation"):
        make_participation(choice, lambda: np.ones((2, 2)) / 2, 2, 0)


@pytest.mark.parametrize(
    ("train", "test", "validation"),
    [
        ([0, 1], [1], []), ([0, 9], [], []), ([[0]], [], []), ([0.5], [], []), ([10], [], []), ([], [-1], []),
        ([0, 1], [], [1]), ([0], [1], [1]), ([0], [1], [9]), ([0], [1], [2]),
    ],
)  # fmt: skip
def test_clients_of_a_partition_that_is_drawn_when_asked_are_looked_at(expect_error, train, test, validation):
    class Drawn(Partition):
        num_clients = 2
        __init__ = object.__init__
        train = lambda self, client: np.array(train)  # noqa: E731
        test = lambda self, client: np.array(test, dtype=int)  # noqa: E731
        validation = lambda self, client: np.array(validation, dtype=int)  # noqa: E731

    with contextlib.nullcontext() if (train, test, validation) == ([0], [1], [2]) else expect_error("partition"):
        check_lazy(choose("partition", config_of("partition=sampled")["partition"]), Drawn(), np.arange(10) == 9, Drawn)


@pytest.mark.parametrize("part", [np.ones(4, bool), np.array([7])])
def test_index_arrays_index(expect_error, part):
    """A mask would be read as ones and zeros."""
    with expect_error(kind=(TypeError, ValueError)):
        Partition([part], [part[:0]], np.zeros(4, dtype=np.int64), 2)


def test_an_empty_part_has_no_type():
    parts = [np.array([0, 1]), np.array([])]
    assert Partition(parts, [[], []], np.zeros(4, dtype=np.int64), 2).sizes.tolist() == [2, 0]


def raise_type_error(config, draw):
    raise TypeError("no owner")


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("split", raise_type_error),
        ("explicit", lambda config, test, num_clients: None),
        ("explicit", lambda config, test, num_clients: ([np.arange(3)], None)),
        ("explicit", lambda config, test, num_clients: ([np.arange(3), np.array([1.5])], None)),
        ("explicit", lambda config, test, num_clients: ([np.arange(3), np.array([99999])], None)),
        ("explicit", lambda config, test, num_clients: ([np.arange(3), np.array([2])], None)),
        ("explicit", lambda config, test, num_clients: ([np.arange(3), np.arange(3, 1797)], None)),
    ],
)
def test_what_a_changed_partitioner_returns_is_a_partition(monkeypatch, expect_error, name, function):
    monkeypatch.setattr(iid, name, function, raising=False)
    with expect_error("partition"):
        load_federation(resolve(config_of("partition=iid", "num_clients=2")).client)
