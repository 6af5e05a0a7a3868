"""For any message of a server, a device reads and writes below its own folders, and sends only what DEPLOY.md lists."""

import contextlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from helpers import config_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from messages import ROOT
from tiny import TINY_RUN, tiny_workspace
from wire import RUN, Wire, plain, run_devices

import contrafed.client_app.app
from contrafed.client_app.files import Moment
from contrafed.client_app.message_checks import check_modules, check_paths, moment_of, run_name
from contrafed.core import codec
from contrafed.core.client_run import client_run_of
from contrafed.core.errors import UserError
from contrafed.engines.worker import identify
from contrafed.training.workspace import uninstall

pytestmark = pytest.mark.usefixtures("quick_devices")

NASTY_TEXTS = [
    "", ".", "..", "../../up", "/etc/passwd", "/", "~root/x", "1/../../2", "1\0", "1\n", "9" * 5000, "1@", "1@2/../..", "-1",
    "1e3", "file:///etc", "C:\\x", "4242-1.safetensors", "\u0663\u0664", "1@\u0662", "\u202e1", "\ud800",
]  # fmt: skip
ANY_VALUE = st.one_of(
    st.sampled_from(NASTY_TEXTS), st.text(), st.integers(-(2**62), 2**62), st.floats(), st.binary(), st.booleans(),
    st.lists(st.one_of(st.sampled_from(NASTY_TEXTS), st.text())), st.lists(st.integers(-9, 9)),
)  # fmt: skip
KEYS = ("run", "past", "known", "checkpoint", "save", "load", "server-round", "final")

watching: list[tuple[str, str]] | None = None  # what the process does to files, while a test looks


def _audit(event, arguments):
    if watching is None or event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link"):
        return
    if event == "open" and not (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
        return
    named = arguments[:2] if event in ("os.rename", "os.link") else arguments[:1]
    watching.extend((event, str(argument)) for argument in named if isinstance(argument, str | bytes | Path))


sys.addaudithook(_audit)


def or_refused(function, *arguments):
    """Return a function's result and None, or None and the one line of its refusal."""
    try:
        return function(*arguments), None
    except UserError as error:
        return None, str(error)


@given(ANY_VALUE)
def test_a_runs_name_is_digits_or_refused(value):
    name, said = or_refused(run_name, value)
    assert (said is None and re.fullmatch("[0-9]{1,20}", name, re.ASCII)) or ("\n" not in said and len(said) < 300)


@given(st.dictionaries(st.sampled_from(KEYS), ANY_VALUE))
def test_where_a_run_stands_is_read_or_refused(config):
    found, said = or_refused(moment_of, config, "7")
    if found is None:
        assert "\n" not in said
        return
    name, now = found
    assert isinstance(now, Moment)
    assert all(key.isascii() and key.isdecimal() for key in (name, *now.past))
    assert all(type(t) is int for t in now.past.values())


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Return a client with its folder, and messages to it that are valid except for a test's changes."""
    folder = tmp_path_factory.mktemp("client") / "own" / "state"
    folder.mkdir(parents=True)
    _, workspace, text = tiny_workspace("strategy=fedcrl")
    identify()
    received = {
        name: torch.zeros(shape)
        for name, shape in workspace.client_class.message_spec(workspace.model, workspace.config)[0].items()
    }
    received |= {f"model/{name}": value for name, value in workspace.initial.items() if f"model/{name}" in received}

    def send(kind, changes):
        config = {"settings": text, "server-round": 1} | changes
        content = RecordDict({codec.ARRAYS: codec.to_record(received), codec.CONFIG: ConfigRecord(config)})
        context = Context(RUN, 10, {"partition-id": 0, "state-dir": str(folder)}, RecordDict(), {})
        message = Message(content, 10, kind)
        message.metadata.__dict__["_message_id"] = "1"
        return contrafed.client_app.app.app(message, context)

    send(MessageType.QUERY, {})
    yield folder, send
    uninstall()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([MessageType.QUERY, MessageType.TRAIN, MessageType.EVALUATE]),
    st.dictionaries(st.sampled_from(KEYS), ANY_VALUE, min_size=1),
)
def test_a_client_writes_below_its_own_folder_only(client, kind, changes):
    global watching
    folder, send = client
    watching = []
    try:
        with contextlib.suppress(UserError, ValueError, TypeError):
            send(kind, changes)
    finally:
        seen, watching = watching, None
    assert [(event, path) for event, path in seen if not Path(path).is_relative_to(folder)] == []
    inside = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    allowed = r"client_state/[0-9]{1,20}-0\.(safetensors|kept)|personal/[0-9]{1,20}/0\.safetensors"
    assert [name for name in inside if not re.fullmatch(allowed, name)] == []


def test_data_sets_lie_where_the_client_says(tmp_path, expect_error):
    mine = tmp_path / "mine"
    (mine / "sets").mkdir(parents=True)
    (mine / "way-out").symlink_to(tmp_path)

    def text(**changes):
        run = json.loads(client_run_of(config_of(*TINY_RUN)).to_json())
        for key, value in changes.items():
            group, name = key.split("_")
            run[group][name] = value
        return json.dumps(run)

    for value in (f"{mine}/sets", f"{mine}/sets/../sets", str(mine), None):
        check_paths(text(dataset_root=value, dataset_path=value, partition_path=value), str(mine))
    for value in (
        "/etc",
        f"{mine}/..",
        f"{mine}/way-out/x",
        "sets",
        "~root/x",
        "~nobody-there/x",
        "a\0b",
        "x" * 9000,
        3,
        "",
        f"{mine}2",
    ):
        for key in ("dataset_root", "dataset_path", "partition_path", "model_pretrained"):
            with expect_error():
                check_paths(text(**{key: value}), str(mine))
    check_paths(text(dataset_root="/etc", model_pretrained=f"{mine}/weights.pt"), str(mine), own_data=True)
    with expect_error("model.pretrained"):
        check_paths(text(model_pretrained="/etc/passwd"), str(mine), own_data=True)


@pytest.mark.parametrize(
    ("target", "modules", "allowed"),
    [
        ("torch.nn.Linear", "", True),
        ("torchvision.models.resnet18", "", True),
        ("torch.utils.cpp_extension.load", "", False),
        ("torch.nnx.Net", "", False),
        ("this.x", "", False),
        ("mine.nets.Net", "", False),
        ("mine.nets.Net", "other, mine", True),
        ("contrafed.models.cnn.CNN", "", True),
        ("contrafed.benchmarks.run.Net", "", False),  # any file beside the package, in a checkout
        ("contrafed.main", "", False),
    ],
)
def test_a_network_of_another_package_needs_the_owners_consent(target, modules, allowed, expect_error):
    settings = json.dumps({"model": {"name": "torch", "target": target}})
    with contextlib.nullcontext() if allowed else expect_error("model"):
        check_modules(settings, modules)


def test_a_data_set_of_the_hub_is_no_folder_of_the_clients(tmp_path, monkeypatch, expect_error):
    def text(repository, path=None):
        run = json.loads(client_run_of(config_of(*TINY_RUN)).to_json())
        run["dataset"] |= {"repository": repository, "path": path, "root": str(tmp_path)}
        return json.dumps(run)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for name in ("uoft-cs/cifar10", "flwrlabs/femnist_v1.0", None):
        check_paths(text(name), str(tmp_path))
        check_paths(text(name, path="generated"), str(tmp_path))
    # imagefolder and json are code of the datasets library, which reads the working folder
    nearby = ("photos", "./photos", "../photos", "a/../photos", "~/photos", "imagefolder", "json")
    for name in (f"{tmp_path}/photos", *nearby, "", "a/b/c"):
        with expect_error("dataset.repository"):
            check_paths(text(name), str(tmp_path))


@pytest.mark.parametrize(
    ("target", "args", "refused"),
    [
        ("torchvision.models.resnet18", {"weights": "DEFAULT"}, True),
        ("torchvision.models.segmentation.fcn_resnet50", {"weights": None, "weights_backbone": "DEFAULT"}, True),
        ("torchvision.models.segmentation.fcn_resnet50", {"weights_backbone": None}, False),
        # their backbones download by default
        ("torchvision.models.segmentation.fcn_resnet50", {}, True),
        ("torchvision.models.detection.retinanet_resnet50_fpn", None, True),
        ("torchvision.models.get_model", {"name": "fcn_resnet50"}, True),
        ("torchvision.models.no_such.Net", {}, False),
        ("torchvision.models.resnet18", {"pretrained": True}, True),
        ("torchvision.models.resnet18", {"weights": None, "pretrained": False, "num_classes": 4}, False),
        ("own.network", {"weights": [1, 2]}, False),
    ],
)
def test_a_server_has_a_device_download_no_weights(target, args, refused, tmp_path, expect_error):
    run = json.loads(client_run_of(config_of(*TINY_RUN)).to_json())
    run["dataset"] |= {"path": "generated", "root": str(tmp_path)}
    run["model"] = {"name": "torch", "target": target, "args": args, "pretrained": None}
    with expect_error("model.target" if target.endswith("get_model") else None) if refused else contextlib.nullcontext():
        check_paths(json.dumps(run), str(tmp_path))


def test_a_server_that_names_files_elsewhere_is_refused_before_round_1(tmp_path, expect_error):
    (tmp_path / "parts.json").write_text(json.dumps([list(range(20 * k, 20 * k + 20)) for k in range(3)]))
    given_by_server = (
        "strategy=fedavg", "dataset.merge_splits=true", "partition=file", f"partition.path={tmp_path}/parts.json",
    )  # fmt: skip
    with expect_error("client"):
        run_devices(tmp_path / "a", Wire(*plain()), *given_by_server)
    *_, summary = run_devices(tmp_path / "b", Wire(*plain(**{"data-dir": tmp_path})), *given_by_server)
    assert summary["status"] == "finished"


def test_a_path_to_save_to_is_refused_without_state_dir(tmp_path, expect_error):
    context = Context(RUN, 10, {"partition-id": 0}, RecordDict(), {})
    for key in ("save", "load"):
        with expect_error("--node-config"):
            contrafed.client_app.app._resolve_personal_paths({key: str(tmp_path)}, context, None)


def test_deploy_lists_every_field_that_a_client_sends(tmp_path, expect_error):
    """Names of metrics and settings that clients send to the server, for two methods with many of them."""
    seen = set()

    def change(k, message, reply):
        for record in (codec.METRICS, codec.CONFIG):
            seen.update(reply.content.get(record, {}))
        return reply

    for name in ("fedcrl", "pmfl"):
        wire = Wire(*plain(**{"state-dir": f"{tmp_path}/{name}{{k}}"}), change=change)
        run_devices(tmp_path / name, wire, f"strategy={name}", "num_rounds=1", "eval_clients=true")
    with expect_error("client"):
        run_devices(tmp_path / "refused", Wire(*plain(typo=1), change=change), "strategy=fedavg")
    text = (ROOT / "docs" / "DEPLOY.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([\w/-]+)`", text[text.index("## What the server learns") :].split("\n## ")[0]))
    assert {"partition-id", "class-counts", "has-state", "num-examples", "loss", "refused"} <= seen
    assert seen - listed == set()
