"""Data that are no images: tables, signals and tokens, from an npz or from UCI-HAR."""

import numpy as np
import pytest
import torch
from helpers import config_of, stacked_and_alone, workspace_of
from test_loaded import load
from tiny import engines_agree

from contrafed.config.run_config import resolve
from contrafed.core.errors import UserError
from contrafed.core.inputs import Inputs
from contrafed.data.images import load_images
from contrafed.data.loaded import about_loaded, describe_loaded
from contrafed.data.owners import OwnerCounts
from contrafed.partitions.datasets.uci_har import SIGNALS
from contrafed.runs.run import run

RNG = np.random.default_rng(0)
LABELS = np.arange(60) % 3
QUICK = ("engine=local", "tracker=none", "num_clients=3", "num_rounds=2", "eval_every=1", "participation=full", "partition=iid")
ARRAYS = {
    "table": (RNG.normal(3, 2, (60, 7)) + LABELS[:, None]).astype(np.float64),
    "signals": RNG.normal(0, 1, (60, 4, 16)) + LABELS[:, None, None],
    "tokens": np.concatenate([LABELS[:, None] + 1, RNG.integers(4, 30, (60, 4)), np.zeros((60, 2), int)], axis=1),
}
NETWORKS = {
    "table": ("model=mlp", "model.hidden=[8]"),
    "signals": ("model=cnn1d", "model.channels=[4,4]", "model.hidden=[8]", "dataset.kind=values"),
    "tokens": ("model=embedding_bag", "model.width=8", "model.hidden=[8]", "model.padding=0"),
}


@pytest.fixture
def write(tmp_path):
    def write_file(**arrays):
        np.savez(tmp_path / "data.npz", **{"y": LABELS} | arrays)
        return tmp_path / "data.npz"

    return write_file


def config_for(kind, path, *more):
    return config_of(*QUICK, "dataset=npz", f"dataset.path={path}", *NETWORKS[kind], *more)


def test_a_constant_column_of_any_number_is_loaded(write):
    table = ARRAYS["table"].copy()
    table[:, 3] = 0.1
    data = load_images(resolve(config_for("table", write(x=table))).client.dataset)
    assert data.std[3] == 1


def test_a_file_without_examples_is_one_line(write, expect_error):
    path = write(x=np.zeros((0, 5)), y=np.zeros(0, int))
    with expect_error():
        load_images(resolve(config_for("table", path)).client.dataset)


@pytest.mark.parametrize(
    ("kind", "told"), [("table", "7 numbers"), ("signals", "4x16 numbers"), ("tokens", "7 tokens (of 30)")]
)
def test_a_run_on_each_kind(write, tmp_path, capsys, kind, told):
    summary = run(
        config_for(kind, write(x=ARRAYS[kind]), "strategy=fedcrl", "partition.test_fraction=0.2", f"output_dir={tmp_path}/a")
    )
    assert f"60 examples of {told}, 3 classes, 45 train, 15 test" in capsys.readouterr().out
    assert (summary["data"]["examples"], summary["failures"]) == (60, 0)


@pytest.mark.parametrize("kind", ARRAYS)
def test_a_stack_equals_its_clients_alone(write, kind):
    path = write(x=ARRAYS[kind])
    workspace = workspace_of(config_for(kind, path, "strategy=moon", "partition.test_fraction=0.2"), dtype=torch.float64)
    for update in stacked_and_alone(workspace, rounds=1):
        for name, value in update.tensors.items():
            assert not torch.equal(value, workspace.initial[name.removeprefix("model/")]) or "bias" in name


@pytest.mark.parametrize("kind", ARRAYS)
def test_networks_have_levels_and_resume_from_any_stage(write, kind):
    workspace = workspace_of(config_for(kind, write(x=ARRAYS[kind]), "strategy=fedavg"))
    model, x = workspace.model, workspace.images(torch.arange(5))
    with torch.no_grad():
        found = model(x, with_levels=True)
        assert all(level.shape[0] == 5 and level.dim() == 2 for level in found.levels)
        for level, out in enumerate([x, *model.encoder.outputs(x)]):
            assert torch.equal(model.resume(out, level).logits, found.logits)


def test_values_are_standardised_by_the_training_part(write):
    split = np.arange(60) % 4 // 3
    workspace = workspace_of(config_for("table", write(x=ARRAYS["table"], split=split)))
    train = torch.from_numpy(np.flatnonzero(split == 0))
    found = workspace.images(train).squeeze(1)
    torch.testing.assert_close(found.mean(0), torch.zeros(7), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.std(0, correction=0), torch.ones(7), atol=1e-5, rtol=0)
    x = ARRAYS["signals"].copy()
    x[:, 2] = 5  # a constant channel is not divided by zero
    means = workspace_of(config_for("signals", write(x=x, split=split))).images(train).mean((0, 2))
    torch.testing.assert_close(means, torch.zeros(4), atol=1e-5, rtol=0)


def test_owners_are_clients_and_split_2_is_validation_data(write):
    owner, split = np.repeat([7, 3, 9, 9, 9, 3], 10), np.arange(60) % 5
    path = write(x=ARRAYS["table"], owner=owner, split=np.where(split > 2, 0, split))
    config = config_for("table", path, "partition=natural", "partition.test_fraction=0")
    federation = workspace_of(config).federation
    for client in range(3):
        assert len(set(owner[federation.partition.train(client)])) == 1
    assert (federation.central_validation == np.flatnonzero(split == 2)).all()
    assert (federation.central_test == np.flatnonzero(split == 1)).all()


def test_a_run_says_how_many_owners_are_clients(write, tmp_path, capsys):
    path = write(x=ARRAYS["table"], owner=np.repeat([7, 3, 9, 2], [10, 20, 5, 25]), split=np.zeros(60))
    config = config_for("table", path, "partition=natural", "strategy=fedavg", "attack=label_flip", "attack.clients=[0]")
    for clients, told in ((3, 1), (4, 0)):
        run(config | {"num_clients": clients, "output_dir": f"{tmp_path}/{clients}"})
        lines = [line for line in capsys.readouterr().out.splitlines() if "owners are clients" in line]
        assert len(lines) == told
    federation = workspace_of(config).federation
    assert federation.partition.owners == OwnerCounts(3, 4, federation.partition.sizes.sum(), 60)


@pytest.mark.parametrize(
    ("arrays", "more"),
    [
        ({}, ("model=cnn",)),
        ({}, ("strategy.local.augment=[flip]",)),
        ({}, ("dataset.normalize=half",)),
        ({}, ("partition.feature_shift.kind=blur",)),
        ({"x": ARRAYS["tokens"]}, ()),
        ({"x": ARRAYS["tokens"] - 5}, ("model=embedding_bag",)),
        ({"x": ARRAYS["tokens"]}, ("model=embedding_bag", "model.padding=99")),
        ({"x": ARRAYS["signals"]}, ("model=cnn1d",)),
        ({"x": np.where(np.arange(7) == 3, np.nan, ARRAYS["table"])}, ()),
        ({"x": np.ones((60, 7))}, ()),
        ({"owner": np.arange(5)}, ()),
        ({"owner": np.ones((60, 2))}, ()),
        ({"x": np.array(["a"] * 60)[:, None]}, ()),
        ({"x": RNG.normal(0, 1, (60, 4, 3))}, ("model=cnn1d", "dataset.kind=values")),
        ({"split": np.ones((60, 1))}, ()),
        ({}, ("model.image_size=32",)),
        ({"x": ARRAYS["tokens"]}, ("model=embedding_bag", "model.image_size=32")),
    ],
)
def test_what_does_not_fit_is_one_line(write, tmp_path, expect_error, arrays, more):
    path = write(**{"x": ARRAYS["table"]} | arrays)
    plain = [] if any(each.startswith("model=") for each in more) else ["model=mlp"]
    with expect_error():
        run(
            config_of(
                *QUICK, "dataset=npz", f"dataset.path={path}", "strategy=fedavg", *plain, *more, f"output_dir={tmp_path}/a"
            )
        )
    assert not (tmp_path / "a").exists()


def test_images_are_still_images_and_a_kind_may_be_named(write):
    path = write(x=RNG.integers(0, 256, (60, 8, 8), dtype=np.uint8))
    assert load("npz", path).kind == "image"
    values = load("npz", path, kind="values")
    assert (values.kind, values.inputs, values.x.dtype) == ("values", Inputs("values", (8, 8)), torch.float32)
    assert about_loaded(values, ())["shape"] == [8, 8]
    with pytest.raises(UserError, match="dataset.kind"):
        load("npz", write(x=ARRAYS["table"]), kind="tokens")


@pytest.mark.parametrize("inputs", ["features", "signals"])
def test_uci_har_is_read_as_published(tmp_path, inputs):
    for split, count in {"train": 8, "test": 4}.items():
        folder = tmp_path / split / "Inertial Signals"
        folder.mkdir(parents=True)
        np.savetxt(tmp_path / split / f"y_{split}.txt", np.arange(count) % 6 + 1, fmt="%d")
        np.savetxt(tmp_path / split / f"subject_{split}.txt", np.arange(count) // 2 + 1, fmt="%d")
        np.savetxt(tmp_path / split / f"X_{split}.txt", RNG.normal(size=(count, 561)))
        for signal in SIGNALS:
            np.savetxt(folder / f"{signal}_{split}.txt", RNG.normal(size=(count, 128)))
    choice = resolve(
        config_of("dataset=uci_har", f"dataset.path={tmp_path}", f"dataset.inputs={inputs}", "model=mlp")
    ).client.dataset
    data = load_images(choice)
    assert data.x.shape[1:] == ((1, 561) if inputs == "features" else (9, 128))
    assert (int((~data.test).sum()), int(data.test.sum()), sorted(set(data.owner))) == (8, 4, [1, 2, 3, 4])
    (tmp_path / "test" / "y_test.txt").unlink()
    with pytest.raises(UserError, match="dataset.path"):
        load_images(choice)


def test_uci_har_is_generated_with_its_shape():
    choice = resolve(config_of("dataset=uci_har", "model=mlp")).client.dataset
    data = load_images(choice)
    assert (describe_loaded(data), data.stand_in) == (
        "1200 examples of 561 numbers, 6 classes, 840 train, 360 test",
        "generated",
    )
    assert len(set(data.owner[~data.test.numpy()])) == 21
    assert torch.equal(load_images(choice).x, data.x)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "flower"])
@pytest.mark.parametrize("kind", ARRAYS)
def test_engines_agree(write, tmp_path, engine, kind):
    data = ("dataset=npz", f"dataset.path={write(x=ARRAYS[kind])}")
    engines_agree(tmp_path, engine, *QUICK, *data, *NETWORKS[kind], "strategy=fedavg")
