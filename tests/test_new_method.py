"""A new method in the repository is its code, its YAML and its test. Lists of methods include it without changes."""

import os
import shutil
import subprocess
import sys

import pytest
from messages import ROOT
from test_deployment import PACKAGES

FOLDERS = (*PACKAGES, "benchmarks", "docs", "notebooks", "results", "tests")
CLIENT = '''"""FedNew: FedAvg whose loss is multiplied."""

from dataclasses import dataclass
from typing import Annotated

from contrafed.core.schema import Range
from contrafed.training.base import Client, LocalTraining


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client."""

    local: LocalTraining
    scale: Annotated[float, Range(gt=0)]


class FedNewClient(Client):
    """The cross-entropy times ``scale``."""

    def loss(self, params, batch, loss_inputs):
        """Return the multiplied loss."""
        return {"loss": self.config.scale * self.task_loss(self.forward(params, batch), batch)}
'''
STRATEGY = '''"""FedNew: half of FedAvg's step."""

from dataclasses import dataclass

from contrafed.strategies.fedavg import FedAvg, Weights


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the strategy."""


class FedNew(FedAvg):
    """The mean of the old model and of FedAvg's."""

    @classmethod
    def needs_individual_updates(cls, config):
        """It sums."""
        return ""

    def aggregate(self, model, replies):
        """Return the mean."""
        return {name: (model[name] + value) / 2 for name, value in self.mean(model, replies).items()}
'''
YAMLS = {
    "clients": """# FedNew: FedAvg whose loss is multiplied (Somebody 2026)
defaults: [_local@local, server: fedavg, _self_]
name: fednew
scale: 2.0
weights: samples

local:
  iterations: 5
""",
    "strategies": """# FedNew: half of FedAvg's step (Somebody 2026)
defaults: [_local@local, _self_]
name: fednew
module: fedavg
server: fednew
weights: samples

local:
  iterations: 5
""",
}
TEST = """from helpers import digits_run, same


def test_it_moves():
    models, _ = digits_run("fednew", 1, clients=2)
    assert not same(models[0], models[1])
"""
# Where methods are listed, and what they list: a method that somebody forgot there failed one of these.
LISTING = (
    "tests/methods/test_fednew.py",
    "tests/test_plots.py",
    "tests/test_traffic.py",
    "tests/test_aggregation.py",
    "tests/test_privacy.py",
    "tests/test_docs.py",
    "tests/test_record.py",
)
CHOSEN_TESTS = (
    "fednew or look or list or every_method or methods_are or papers or exactly or readme or by_count or links or as_before"
)


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "code"), [("clients", CLIENT), ("strategies", STRATEGY)])
def test_what_lists_methods_takes_a_new_one(tmp_path, folder, code):
    for name in FOLDERS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, tmp_path / path.name)
    (tmp_path / folder / "fednew.py").write_text(code)
    (tmp_path / "conf" / "strategy" / "fednew.yaml").write_text(YAMLS[folder])
    (tmp_path / "tests" / "methods" / "test_fednew.py").write_text(TEST)
    asked = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-vv", *LISTING, "-k", CHOSEN_TESTS]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-4000:]
    for test in (
        "test_it_moves",
        "by_count_equal_what_is_serialised_and_the_papers_formula[fednew-",
        "test_every_method_has_a_page",
    ):
        assert test in done.stdout
