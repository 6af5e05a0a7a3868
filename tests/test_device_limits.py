"""A device runs what its owner allows, and a reply with invented scores is rejected."""

import csv
import json
import sys

import pytest
import torch
from helpers import config_of
from tiny import TINY_RUN, run_tiny
from wire import Wire, answers_but, plain, rows_of, run_devices

from contrafed.client_app.message_checks import check_modules, check_steps
from contrafed.core import codec
from contrafed.core.client_run import client_run_of
from contrafed.core.disk import PRIVATE
from contrafed.core.errors import UserError
from contrafed.core.tensors import write


def settings(**changes):
    values = json.loads(client_run_of(config_of(*TINY_RUN)).to_json())
    for group, module in changes.items():
        values[group] = values[group] | {"module": module}
    return json.dumps(values)


@pytest.mark.parametrize("group", ["strategy", "dataset", "partition", "model"])
def test_a_device_imports_only_what_its_owner_allows(group):
    check_modules(settings(), "")
    with pytest.raises(UserError, match=f"^{group}: "):
        check_modules(settings(**{group: "antigravity.here"}), "")
    with pytest.raises(UserError, match=f"^{group}: "):
        check_modules(settings(**{group: "antigravity.here"}), "anti, gravity")
    check_modules(settings(**{group: "antigravity.here"}), "other, antigravity")


def test_a_foreign_module_is_refused_before_it_is_imported(tmp_path):
    wire = Wire(*plain())
    original = wire.push_messages

    def push(messages):
        messages = list(messages)
        for message in messages:
            config = message.content[codec.CONFIG]
            values = json.loads(config["settings"])
            values["model"]["module"] = "wsgiref.validate"
            config["settings"] = json.dumps(values)
        return original(messages)

    wire.push_messages = push
    sys.modules.pop("wsgiref.validate", None)
    with pytest.raises(UserError, match="cannot participate: model: this device does not import wsgiref.validate"):
        run_devices(tmp_path / "run", wire, "strategy=fedavg")
    assert "wsgiref.validate" not in sys.modules


def test_max_local_steps_bounds_what_a_server_may_ask(tmp_path):
    configs = plain()
    configs[1]["max-local-steps"] = 1
    _, metrics, *_ = run_devices(tmp_path / "run", Wire(*configs), "strategy=fedavg", "num_rounds=1")
    assert rows_of(metrics, "failures") == {1: 1}
    after = ("strategy=fedper", "num_rounds=1", "evaluate_after=local_training")
    _, metrics, clients, _ = run_devices(tmp_path / "after", Wire(*configs), *after)
    scored = {int(r["client"]) for r in csv.DictReader(clients.decode().splitlines()) if r["metric"] == "accuracy"}
    assert scored == {0, 2}
    check_steps(5, 5)
    with pytest.raises(UserError, match="^--node-config max-local-steps "):
        check_steps(5, "5")


@pytest.mark.parametrize("number", ["num-test-examples", "num-validation-examples"])
def test_a_client_without_data_of_its_own_cannot_say_more_examples(tmp_path, number):
    """Its score would otherwise weigh more than all others."""

    def more(message, reply):
        reply.content[codec.METRICS][number] = 2**40
        return reply

    with pytest.raises(UserError, match="partition 1 holds other examples"):
        run_devices(tmp_path / "run", Wire(*plain(), change=answers_but(1, None, more, kind="query")), "strategy=fedper")


@pytest.mark.parametrize("name", ["macro_f1", "validation/accuracy", "validation/num-examples"])
def test_a_client_that_leaves_out_a_score_costs_its_own_alone(tmp_path, name):
    """A summary has only scores that all clients report."""

    def less(message, reply):
        for key in [key for key in reply.content[codec.METRICS] if key == name or key.startswith(f"{name}/")]:
            del reply.content[codec.METRICS][key]
        return reply

    asked = ("strategy=fedper", "num_rounds=1", "metrics=[accuracy,macro_f1]", "partition.validation_fraction=0.2")
    wire = Wire(*plain(), change=answers_but(1, None, less, kind="evaluate"))
    _, _, clients, summary = run_devices(tmp_path / "run", wire, *asked)
    scored = [(r["metric"], int(r["client"])) for r in csv.DictReader(clients.decode().splitlines()) if r["round"] == "1"]
    for metric in ("accuracy", "macro_f1", "validation_accuracy"):
        assert [client for each, client in scored if each == metric] == [0, 2]
    assert (summary["replies_rejected"], summary["personal_macro_f1_mean"] > 0) == (1, True)


def test_a_training_score_that_the_method_does_not_declare_is_rejected(tmp_path, capsys):
    def invent(message, reply):
        reply.content[codec.METRICS]["invented\x1b[2J"] = 0.5
        return reply

    wire = Wire(*plain(), change=answers_but(1, None, invent))
    _, metrics, *_ = run_devices(tmp_path / "run", wire, "strategy=moon", "num_rounds=1")
    assert rows_of(metrics, "replies_rejected") == {1: 1}
    assert "client 1: score 'invented [2J' " in capsys.readouterr().out
    assert b"invented" not in metrics


def test_invented_scores_are_rejected(tmp_path, capsys):
    def change(k, message, reply):
        if k == 1 and message.metadata.message_type != "query":
            metrics = reply.content[codec.METRICS]
            for number in range(500):
                metrics[f"m{number}/accuracy"] = metrics[f"m{number}/loss"] = 0.5
        return reply

    _, metrics, *_ = run_devices(tmp_path / "run", Wire(*plain(), change=change), "strategy=fedper", "num_rounds=2")
    assert len(metrics) < 10_000
    assert "client 1: score 'm0/" in capsys.readouterr().out
    assert b"m0/" not in metrics
    assert set(rows_of(metrics, "replies_rejected").values()) != {0}


def test_client_state_and_personal_models_are_private(tmp_path):
    wire = Wire(*plain(**{"state-dir": f"{tmp_path}/state{{k}}"}))
    run_devices(tmp_path / "run", wire, "strategy=fedper", "save_personal=true", "checkpoint_every=1", "num_rounds=2")
    files = list(tmp_path.glob("state*/*/**/*.safetensors")) + list(tmp_path.glob("state*/**/*.kept"))
    assert {path.parts[-2] for path in files} >= {"client_state"}
    assert [path for path in files if path.stat().st_mode & 0o077] == []


def test_client_state_in_checkpoints_and_in_the_engine_is_private(tmp_path):
    write(tmp_path / "a", {"x": torch.zeros(2)}, mode=PRIVATE)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    run_tiny(tmp_path / "run", "strategy=fedper", "engine=local", "checkpoint_every=1", "num_rounds=2", "save_personal=true")
    files = [*tmp_path.glob("run/checkpoints/clients/*"), *tmp_path.glob("run/personal/**/*.safetensors")]
    assert len(files) >= 6
    assert [path for path in files if path.stat().st_mode & 0o077] == []
