"""A method in a user's package, with YAMLs in a user's folder, without changes in the clone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import resolve_and_try
from messages import ROOT
from omegaconf import OmegaConf

from contrafed.config.command_line import help_text, read_arguments
from contrafed.config.compose import compose_job
from contrafed.core.errors import UserError

TINY_RUN = ("num_clients=4", "num_rounds=2", "eval_every=1", "model=mlp", "participation=full")

CLIENT = """
from dataclasses import dataclass
from typing import Annotated

from contrafed import Client, LocalTraining
from contrafed.core.schema import Range


@dataclass(frozen=True)
class Config:
    local: LocalTraining
    scale: Annotated[float, Range(gt=0)]


class MyClient(Client):
    def loss(self, params, batch, loss_inputs):
        return {"loss": self.config.scale * self.task_loss(self.forward(params, batch), batch)}
"""
RULE = """
from dataclasses import dataclass

from contrafed.strategies.fedavg import FedAvg, Weights


@dataclass(frozen=True)
class Config(Weights):
    share: float


class MyRule(FedAvg):
    def aggregate(self, model, replies):
        mean = self.mean(model, replies)
        return {name: (1 - self.config.share) * model[name] + self.config.share * value for name, value in mean.items()}
"""
METHOD = """# a method of my own
defaults: [_local@local, _self_]
name: mine
module: my_package.my_method
server: my_package.my_rule
scale: 1.0
weights: samples
share: 0.5
local:
  iterations: 2
"""
OTHER_RULE = """# @package strategy
# a rule of my own
server: my_package.my_rule
share: 0.25
"""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_package(folder, method):
    """Write the package my_package and the method's YAML into a folder, and return it."""
    for name, text in {"__init__": "", "my_method": CLIENT, "my_rule": RULE}.items():
        write(folder / "my_package" / f"{name}.py", text)
    write(folder / "yamls" / "strategy" / "mine.yaml", method)
    return folder


@pytest.fixture
def home(on_path, monkeypatch):
    """Return a folder with the package my_package and the YAMLs yamls/, visible to this process and its children."""
    write(on_path / "yamls" / "strategy" / "server" / "half.yaml", OTHER_RULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(on_path), os.environ.get("PYTHONPATH", "")]))
    return write_package(on_path, METHOD)


def command(home, *arguments):
    asked = [sys.executable, str(ROOT / "main.py"), "--config-dir=yamls", *arguments]
    return subprocess.run(asked, cwd=home, capture_output=True, text=True, timeout=900)


def run_to_end(home, engine):
    done = command(home, "strategy=mine", f"engine={engine}", *TINY_RUN, f"output_dir={home}/{engine}")
    assert done.returncode == 0, done.stderr
    return (home / engine / "metrics.csv").read_bytes()


def test_a_method_from_outside_runs_and_is_repeated_by_its_configuration(home, call_command):
    done = call_command(f"--config-dir={home}/yamls", "strategy=mine", "engine=local", *TINY_RUN, f"output_dir={home}/local")
    assert done.returncode == 0, done.stderr
    local = (home / "local" / "metrics.csv").read_bytes()
    assert b"global,fit,loss" in local
    stored = OmegaConf.to_container(OmegaConf.load(home / "local" / "config.yaml"))
    from contrafed import run  # a notebook, which knows nothing of the folder

    assert Path(run(stored | {"output_dir": f"{home}/again"})["folder"], "metrics.csv").read_bytes() == local


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_a_method_from_outside_runs_in_other_engines(home, engine):
    assert run_to_end(home, engine) == run_to_end(home, "local")


def test_a_rule_from_outside_goes_beside_any_method_that_averages_models(home):
    from contrafed import compose, run

    asked = ("strategy=fedprox", "strategy.server=half", "engine=local", *TINY_RUN, f"output_dir={home}/a")
    cfg = compose(*asked, config_dir=home / "yamls")
    assert cfg.strategy.share == 0.25
    assert run(cfg)["status"] == "finished"


def test_flwr_runs_config_names_the_folder(home, monkeypatch, expect_error):
    """``flwr run . --run-config 'config-dir="..." overrides="..."'``: the folder reaches the composition."""
    from flwr.app import Context, RecordDict

    import contrafed.runs.server_app

    def serve(grid, run):
        assert run.client.strategy.module.__name__ == "my_package.my_method"
        assert type(grid).__name__ == "DeviceGrid"
        return {"num_clients": run.num_clients}

    reached = []
    monkeypatch.setattr(contrafed.runs.server_app, "serve", serve)
    monkeypatch.setattr(contrafed.runs.server_app, "print_summary", lambda summary, folder: reached.append((summary, folder)))
    config = {"overrides": f"strategy=mine num_clients=3 output_dir={home}/devices", "config-dir": str(home / "yamls")}
    context = Context(7, 0, node_config={}, state=RecordDict(), run_config=config)
    contrafed.runs.server_app.main(object(), context)
    assert reached == [({"num_clients": 3}, f"{home}/devices")]
    with expect_error("strategy"):
        contrafed.runs.server_app.main(object(), Context(7, 0, {}, RecordDict(), {**config, "config-dir": ""}))


def test_choices_from_outside_are_listed_and_offered(home, call_command, expect_error):
    assert "a method of my own" in help_text(str(home / "yamls"))
    assert "a rule of my own" in help_text(str(home / "yamls"))
    assert "a method of my own" not in help_text()
    with expect_error("strategy"):
        compose_job(["strategy=mini"], home / "yamls")
    with expect_error("strategy"):
        compose_job(["strategy=mine"])
    with expect_error("strategy.scael"):
        compose_job(["strategy=mine", "strategy.scael=1"], home / "yamls")
    done = call_command(f"--config-dir={home}/yamls", "--help")
    assert "a method of my own" in done.stdout


def resolve_mine(home, *overrides):
    return resolve_and_try(OmegaConf.to_container(compose_job(["strategy=mine", *overrides], home / "yamls"), resolve=True))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("weights: samples", "wieghts: samples", "unknown strategy key 'wieghts', did you mean 'weights'? choices: local, "),
        (
            "server: my_package.my_rule\n",
            "",
            "strategy=mine: my_package.my_method has no server strategy (a FederatedStrategy); its YAML's defaults may",
        ),
    ],
)
def test_mistakes_in_a_yaml_of_ones_own_are_named(home, old, new, said):
    path = home / "yamls" / "strategy" / "mine.yaml"
    write(path, path.read_text().replace(old, new))
    with pytest.raises(UserError) as error:
        resolve_mine(home)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("my_method.py", "import no_such"),
        ("my_method.py", "x = 1\ny = ("),
        ("my_method.py", "\n\nfrom contrafed.core.errors import Nothing"),
        ("my_rule.py", "\n1 / 0"),
        ("my_method.py", "x = 1"),
        ("my_rule.py", RULE.replace("@dataclass(frozen=True)\n", "")),
        ("my_method.py", f"from flwr.client import NumPyClient\n{CLIENT.replace('(Client)', '(NumPyClient)')}"),
        ("my_method.py", CLIENT.replace("batch, loss_inputs", "batch")),
        ("my_rule.py", RULE.replace("self, model, replies", "self, replies")),
        ("my_method.py", f"{CLIENT}\n    def message_spec(self, model, config):\n        return {{}}, {{}}"),
        ("my_rule.py", f"{RULE}\n    def __init__(self, config):\n        super().__init__(config)"),
        ("my_rule.py", f"{RULE}\n    def __init__(self, config, **more):\n        self.config = config"),
        ("my_method.py", CLIENT.replace("(Client)", "")),
        ("my_method.py", None),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line_with_its_place(home, file, text, expect_error):
    if text is None:
        (home / "my_package" / file).unlink()
    else:
        write(home / "my_package" / file, text)
    with expect_error():
        resolve_mine(home)


@pytest.mark.parametrize("arguments", [["--config-dir"], ["-cd="], ["-cd=a", "-cd=b"]])
def test_the_option_of_a_folder_takes_one(expect_error, arguments):
    with expect_error():
        read_arguments(["strategy=mine", *arguments])


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [("twin", METHOD, "twin"), ("broken", "name: [", "broken"), ("fedavg", METHOD, "mine"), (None, "", "mine")],
)
def test_folders_that_cannot_be_are_one_line(home, expect_error, file, text, name):
    folder = home / ("yamls" if file else "nowhere")
    if file:
        write(folder / "strategy" / f"{file}.yaml", text)
    with expect_error():
        compose_job([f"strategy={name}"], folder)


def test_an_inherited_aggregate_needs_its_keys(home, expect_error):
    rule = home / "my_package" / "my_rule.py"
    lines = rule.read_text().split("    def aggregate")[0] + "    pass\n"
    rule.write_text(lines)
    with expect_error("strategy.server"):
        resolve_mine(home)
    rule.write_text(lines.replace("FedAvg, Weights", "Config as Above, FedAvg").replace("Config(Weights)", "Config(Above)"))
    yaml = home / "yamls" / "strategy" / "mine.yaml"
    yaml.write_text(yaml.read_text() + "server_lr: 1.0\n")
    sys.modules.pop("my_package.my_rule")
    resolve_mine(home)
