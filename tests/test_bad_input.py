"""Hundreds of wrong configurations and damaged files: each gives one line (``UserError``), and no file is created."""

import copy
import io
import itertools
import json
import math
import pickle
import zipfile

import numpy as np
import pytest
import torch
from helpers import config_of, resolve_and_try
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from contrafed.core import registry
from contrafed.core.errors import UserError
from contrafed.runs import checkpoint
from contrafed.runs.run import run

QUICK_RUN = ("engine=local", "num_clients=3", "num_rounds=1", "model=mlp", "model.hidden=[4]", "partition=iid")
PROBE_SETTINGS = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
# Groups of keys in every configuration. The files of each choice hold the others.
CHOICES = [f"{group}={name}" for group in ("partition", "participation", "model", "engine", "privacy", "strategy") for name in
          registry.choices(group)]  # fmt: skip
WRONG_VALUES = st.one_of(
    st.sampled_from([None, True, "", "x", "nan", "1e-3", "~nobody/x", "a\0b", [], {}, [None], [[1]], {"a": 1}, ["a"]]),
    st.sampled_from([-1, 0, 1, 2**40, 2**63, 10**30, -(10**30), 1e-320, 1e308, math.inf, -math.inf, math.nan]),
    st.integers(-5, 5),
    st.floats(-2, 2),
    st.text(max_size=4),
    st.lists(st.integers(-2, 40), max_size=3),
)


def one_line(call):
    """Return whether a call is refused. Anything but a ``UserError`` of one line fails the test."""
    refused = None
    try:
        call()
    except UserError as error:
        refused = str(error)
    assert refused is None or (refused and "\n" not in refused)
    return refused is not None


def list_key_paths(config, above=()):
    """Return every key of a configuration, and every group of keys."""
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from list_key_paths(value, (*above, key))


def change_config(config, place, action, value):
    """Return a copy with one value replaced, one key removed, or one added."""
    config = copy.deepcopy(config)
    group = config
    for key in place[:-1]:
        group = group[key]
    if action == "remove":
        del group[place[-1]]
    else:
        group[f"{place[-1]}z" if action == "add" else place[-1]] = value
    return config


def probe(data, bases):
    base = config_of(data.draw(st.sampled_from(bases)))
    place = data.draw(st.sampled_from(sorted(list_key_paths(base))))
    action = data.draw(st.sampled_from(("replace", "replace", "replace", "remove", "add")))
    wrong = change_config(base, place, action, data.draw(WRONG_VALUES))
    refused = one_line(lambda: resolve_and_try(wrong))
    assert refused or action == "replace" or place[0] == "dataset", (place, action)


@settings(PROBE_SETTINGS, max_examples=20)
@given(st.data())
def test_a_wrong_value_anywhere_is_one_line(data):
    probe(data, CHOICES[::3])


@pytest.mark.slow
@settings(PROBE_SETTINGS, max_examples=2000)
@given(st.data())
def test_thousands_of_wrong_values_in_every_choice(data):
    probe(data, CHOICES)


@settings(PROBE_SETTINGS, max_examples=15)
@given(st.data())
def test_what_the_command_line_is_given_is_read_or_refused_in_a_line(data):
    from helpers import check_overrides

    pieces = [
        "seed", "strategy", "strategy.local.lr", "partition", "++x", "~", "=", ",", "[", "]", "{", "'", "\\", "1", "pmfl", " ",
    ]  # fmt: skip
    overrides = data.draw(st.lists(st.lists(st.sampled_from(pieces), min_size=1, max_size=5).map("".join), max_size=2))
    one_line(lambda: check_overrides(*overrides))


def arrays(**changes):
    """Return a valid npz file's bytes, with changes."""
    rng = np.random.default_rng(0)
    held = {"x": rng.integers(0, 256, (60, 8, 8), dtype=np.uint8), "y": np.arange(60) % 3} | changes
    file = io.BytesIO()
    np.savez(file, **{name: value for name, value in held.items() if value is not None})
    return file.getvalue()


def claiming(shape):
    """Return an npz file whose array claims to be much larger than it is."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("x", "y"):
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
            archive.writestr(f"{name}.npy", header.getvalue() + b"abc")
    return file.getvalue()


def without_arrays():
    """Return an npz file whose members are text."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("x", "y"):
            archive.writestr(name, b"hello")
    return file.getvalue()


IMAGES = np.zeros((60, 8, 8))
BAD_NPZ = {
    "empty": b"", "text": b"hello", "no arrays": without_arrays(), "times": arrays(y=np.zeros(60, dtype="m8[s]")),
    "pickle": pickle.dumps({"x": 1}), "cut": arrays()[:700], "huge": claiming((10**15,)),
    "overflow": claiming((2**62, 2**62)), "no y": arrays(y=None), "objects": arrays(x=np.array([{}] * 60, dtype=object)),
    "complex": arrays(x=IMAGES.astype(complex)), "negative": arrays(x=IMAGES - 1), "nan": arrays(x=IMAGES * np.nan),
    "text pixels": arrays(x=np.full((60, 8, 8), "a")), "one dimension": arrays(x=np.zeros(60, dtype=np.uint8)),
    "scalar": arrays(x=np.uint8(1)), "no image": arrays(x=np.zeros((0, 8, 8), dtype=np.uint8), y=np.zeros(0, dtype=int)),
    "tiny": arrays(x=np.zeros((60, 2, 2), dtype=np.uint8)), "channels": arrays(x=np.zeros((60, 8, 8, 5), dtype=np.uint8)),
    "labels": arrays(y=np.arange(60) % 3 - 1), "large labels": arrays(y=np.full(60, 2**62)), "floats": arrays(y=np.zeros(60)),
    "few labels": arrays(y=np.arange(5)), "one class": arrays(y=np.zeros(60, dtype=int)),
    "split": arrays(split=np.full(60, 2)), "all test": arrays(split=np.ones(60)), "short split": arrays(split=np.zeros(3)),
}  # fmt: skip


def refuses(tmp_path, *overrides):
    """Assert that a run with these overrides is refused in one line and leaves no file."""
    before = sorted(tmp_path.rglob("*"))
    assert one_line(lambda: run(config_of(*QUICK_RUN, *overrides, f"output_dir={tmp_path}/run"))), overrides
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", BAD_NPZ)
def test_a_damaged_npz_file_is_one_line_and_leaves_nothing(tmp_path, name):
    (tmp_path / "bad.npz").write_bytes(BAD_NPZ[name])
    refuses(tmp_path, "dataset=npz", f"dataset.path={tmp_path}/bad.npz")


@settings(PROBE_SETTINGS, max_examples=60)
@given(st.integers(0, len(arrays()) - 1), st.binary(min_size=1, max_size=8), st.booleans())
def test_an_npz_file_with_any_bytes_overwritten_is_read_or_refused(tmp_path_factory, place, bytes_, cut):
    from contrafed.core.client_run import choose
    from contrafed.data.images import load_images

    path = tmp_path_factory.mktemp("npz") / "bad.npz"
    good = arrays()
    path.write_bytes(good[:place] + bytes_ + (b"" if cut else good[place + len(bytes_) :]))
    one_line(lambda: load_images(choose("dataset", config_of("dataset=npz", f"dataset.path={path}")["dataset"])))


def test_a_folder_of_damaged_images_is_one_line(tmp_path):
    from PIL import Image

    root = tmp_path / "images"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for number in range(9):
            Image.fromarray(np.full((8, 8), number, dtype=np.uint8)).save(root / name / f"{number}.png")
    good = (root / "a" / "0.png").read_bytes()
    for bad in (b"", b"no image", good[:40], good[:30] + b"\xff" * 20 + good[50:], pickle.dumps([1])):
        (root / "a" / "0.png").write_bytes(bad)
        refuses(tmp_path, "dataset=folder", f"dataset.path={root}")
    (root / "a" / "0.png").write_bytes(good)
    for path in (root / "b").iterdir():
        path.unlink()
    refuses(tmp_path, "dataset=folder", f"dataset.path={root}")
    refuses(tmp_path, "dataset=folder", f"dataset.path={root / 'a' / '0.png'}")


BAD_PARTITIONS = [
    b"", b"\xff\xfe", b"[", b"{}", b"[]", b"1", b"null", b'"a"', b"[[1],[2]]", b"[[1],[2],[2]]", b"[[1],[2],[999999]]",
    b"[[1],[2],[-1]]", b"[[1],[2],[1.5]]", b"[[1],[2],[true]]", b"[[1],[2],[NaN]]", b"[[1],[2],[[3]]]", b"[[1],[2],3]",
    b'{"0":[1],"x":[2],"2":[3]}', b'{"train":[[1],[2],[3]],"test":4}', b"[" * 100000, b"[[1],[2],[1" + b"0" * 400 + b"]]",
    b"__import__('os').system('true')", b'{"train": {"0": [1]}, "test": {"0": [1]}}',
]  # fmt: skip
BAD_TRACES = [
    b"", b"\xff\xfe\x00", b"client,round\n1,1\n", b"client,round,available\n", b"client,round,available\n0,1,2\n",
    b"client,round,available\n9,1,1\n", b"client,round,available\n0,0,1\n", b"client,round,available\n0,1,1\n0,1,0\n",
    b"client,round,available\na,1,1\n", b"client,round,available\n,1,1\n",
    b"client,round,available\n0,nan,1\n",
    b"client,round,available\n0,1e300,1\n", b"client,round,available\n0.5,1,1\n", b'client,round,available\n"0,1,1\n',
    b"PAR1" * 9,
]  # fmt: skip


def test_damaged_partitions_and_traces_are_one_line_and_leave_nothing(tmp_path):
    path = tmp_path / "given"
    for content in BAD_PARTITIONS:
        path.write_bytes(content)
        refuses(tmp_path, "partition=file", f"partition.path={path}")
    for content, name in itertools.product(BAD_TRACES, ("given", "given.parquet")):
        (tmp_path / name).write_bytes(content)
        refuses(tmp_path, "participation=trace", f"participation.path={tmp_path / name}")
    refuses(tmp_path, "partition=file", f"partition.path={tmp_path}")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Return the folder of a finished run with checkpoints and personal models."""
    folder = tmp_path_factory.mktemp("done") / "run"
    how = ("strategy=fedper", "checkpoint_every=1", "save_personal=true", "partition.test_fraction=0.2")
    run(config_of(*QUICK_RUN, *how, "participation=full", f"output_dir={folder}"))
    return folder


def damage_file(good):
    """Safetensors files that are invalid or were changed."""
    header = int.from_bytes(good[:8], "little")
    yield from (
        b"",
        b"x",
        good[: len(good) // 2],
        good[:-1],
        good[:8] + b"{" * min(header, 99) + good[8 + min(header, 99) :],
        pickle.dumps({"a": 1}),
    )
    yield (2**60).to_bytes(8, "little") + good[8:]
    yield save({"other": torch.ones(2)})


def test_damaged_models_are_one_line_and_leave_nothing(tmp_path, done):
    from safetensors.torch import load_file

    good = done / "model.safetensors"
    model = load_file(good)
    wrong = [{n: v.int() for n, v in model.items()}, {n: v * math.nan for n, v in model.items()}]
    wrong += [{n: v.flatten()[:1] for n, v in model.items()}, dict(list(model.items())[1:])]
    for content in (*damage_file(good.read_bytes()), *map(save, wrong)):
        (tmp_path / "model").write_bytes(content)
        refuses(tmp_path, f"init_from={tmp_path}/model")
    refuses(tmp_path, f"init_from={tmp_path}")


def test_a_damaged_personal_model_is_one_line(tmp_path, done):
    target = done / "personal" / "1.safetensors"
    good = target.read_bytes()
    try:
        for content in damage_file(good):
            target.write_bytes(content)
            config = config_of(f"evaluate_only={done}", f"output_dir={tmp_path}/scored", "engine=local")
            assert one_line(lambda: run(config)), content[:20]  # noqa: B023
    finally:
        target.write_bytes(good)


def test_a_damaged_checkpoint_is_no_checkpoint(done):
    (path,) = (p for p in (done / "checkpoints").iterdir() if p.name.isdigit())
    files = [path / "state.json", path / "server.safetensors", *(done / "checkpoints" / "clients").iterdir()]
    state = json.loads((path / "state.json").read_text())
    odd = [{**state, key: value} for key in state for value in (None, 1, [], "x") if state[key] != value]
    for file in files:
        good = file.read_bytes()
        same_size = [good[:8] + b"{" * 20 + good[28:], b"\xff" * len(good)]
        others = [json.dumps(content).encode() for content in (*odd, [], None)] if file.name == "state.json" else []
        try:
            for content in (*damage_file(good), *same_size, *others):
                file.write_bytes(content)
                found = checkpoint.find(done)
                # A round or a log's length of another kind is all that is left to be noticed later.
                assert found is None or (content in others and isinstance(found.config, dict)), content[:60]
        finally:
            file.write_bytes(good)
    assert checkpoint.find(done) is not None
