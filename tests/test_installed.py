"""Contrafed installed from its wheel, outside the clone: the command ``contrafed``, the YAMLs, the marks of typed packages."""

import os
import subprocess
import sys
from importlib.metadata import PathDistribution

import pytest
from test_deployment import PACKAGES, ROOT, app_folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the installed packages, and the command in ``bin/``."""
    source, place = app_folder(tmp_path_factory.mktemp("wheel") / "clone"), tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--no-compile", "--target", str(place), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return place


def contrafed(installed, folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    script = [sys.executable, str(installed / "bin" / "contrafed"), *arguments]
    return subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_the_wheel_has_the_yamls_the_marks_and_the_command(installed):
    for package in PACKAGES[:-1]:
        assert (installed / package / "py.typed").is_file(), package
    yamls = {path.relative_to(ROOT) for path in (ROOT / "conf").rglob("*.yaml")}
    assert {path.relative_to(installed) for path in (installed / "conf").rglob("*.yaml")} == yamls
    assert len(list((installed / "contrafed" / "analysis" / "published").glob("*.csv"))) == 5
    (about,) = installed.glob("contrafed-*.dist-info")
    distribution = PathDistribution(about)
    assert distribution.entry_points["contrafed"].value == "main:command"
    assert distribution.entry_points["contrafed-report"].value == "report:main"
    assert (installed / "report.py").is_file()
    assert distribution.metadata["License-Expression"] == "Apache-2.0"


def test_the_command_speaks_for_itself_outside_the_clone(installed, tmp_path):
    shown = contrafed(installed, tmp_path, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "\n  contrafed strategy=pmfl participation=markovian " in shown.stdout
    assert f"are in {installed}/conf/GROUP/CHOICE.yaml" in shown.stdout
    wrong = contrafed(installed, tmp_path, "strategy=pfml")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: unknown strategy 'pfml', did you mean 'pmfl'?")


@pytest.mark.slow
def test_a_run_outside_the_clone(installed, tmp_path):
    small = ("engine=local", "num_nodes=4", "num_rounds=2", "eval_every=1", "model=mlp", "model.hidden=[8]")
    done = contrafed(installed, tmp_path, *small, "output_dir=here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("everything is in here\n")
    assert (tmp_path / "here" / "summary.json").is_file()
