"""Contrafed from the checkout, from its wheel, and from an editable install in use from another folder."""

import ast
import importlib
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from helpers import read_rows, slow
from test_deployment import PACKAGES, ROOT, app_folder

import contrafed

SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
# The folders of a checkout that are packages of contrafed.
FOLDERS = tuple(SETUPTOOLS["package-dir"].values())
SMALL_RUN = (
    "participation=markovian", "participation.beta=null", "participation.mean_probability=0.8", "num_clients=4", "num_rounds=2",
    "seed=1", "eval_every=1", "model=mlp", "model.hidden=[8]", "tracker=none",
)  # fmt: skip


def pip(*arguments):
    asked = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a copy of the checkout, for setuptools to write to."""
    return app_folder(tmp_path_factory.mktemp("source") / "contrafed")


@pytest.fixture(scope="module")
def built(source):
    """Return the wheel, and the build's output."""
    printed = pip("wheel", "-v", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(source.parent), str(source))
    (wheel,) = source.parent.glob("*.whl")
    return wheel, printed


def environment_with(folder, *arguments):
    """Create a virtual environment with Contrafed and the packages installed here, and return its programs."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/*/site-packages")
    # Only the names on the path: what is installed here in editable form, Contrafed say, is not looked up there.
    here = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "needed.pth").write_text("\n".join(here))
    pip(
        "--python", str(folder / "bin" / "python"), "install", "-q", "--no-deps", "--no-build-isolation", "--no-index",
        "--ignore-installed", *arguments,
    )  # fmt: skip
    return folder / "bin"


@pytest.fixture(scope="module")
def from_wheel(built, tmp_path_factory):
    return environment_with(tmp_path_factory.mktemp("wheel") / "environment", str(built[0]))


@pytest.fixture(scope="module")
def editable(source, tmp_path_factory):
    return environment_with(tmp_path_factory.mktemp("editable") / "environment", "-e", str(source))


@pytest.fixture(scope="module")
def programs(request):
    """Return the Python with Contrafed (``checkout``, ``wheel`` or ``editable``), and the necessary path."""
    if request.param == "checkout":
        return Path(sys.executable).parent, str(ROOT), ROOT
    name = {"wheel": "from_wheel", "editable": "editable"}[request.param]
    found = request.getfixturevalue(name)
    return found, "", found.parent if request.param == "wheel" else request.getfixturevalue("source")


def call_program(program, *arguments, folder, path="", timeout=900):
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run([program, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)


def accuracies(folder):
    """Return the accuracy of the global model after each evaluated round."""
    rows = [
        row
        for row in read_rows(folder / "metrics.csv")
        if (row["scope"], row["split"], row["metric"]) == ("global", "test", "accuracy")
    ]
    return {int(row["round"]): float(row["value"]) for row in rows}


def test_the_list_of_packages_is_what_is_on_the_disk():
    """setuptools needs a list if folders have other names than packages."""
    found = {"hydra_plugins"}
    for package, top in {"contrafed": "contrafed", **SETUPTOOLS["package-dir"]}.items():
        for folder in (ROOT / top, *(path for path in (ROOT / top).rglob("*") if path.is_dir())):
            if any(path.suffix in (".py", ".yaml", ".csv") for path in folder.iterdir()):
                found.add(".".join((package, *folder.relative_to(ROOT / top).parts)))
    assert SETUPTOOLS["packages"] == sorted(found)
    assert {f"contrafed.{folder}" for folder in FOLDERS} == SETUPTOOLS["package-dir"].keys()
    assert {*FOLDERS, "contrafed", "hydra_plugins"} == set(PACKAGES)


def test_the_folder_of_plugins_belongs_to_nobody():
    """Other plugins for Hydra are in a package of this name too."""
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()


def test_types_are_checked_in_all_of_the_folders():
    script = (ROOT / ".ci" / "mypy").read_text(encoding="utf-8")
    assert f"folders=({' '.join(FOLDERS)})" in script


def test_the_wheel_has_two_names_and_all_that_they_need(built):
    wheel, printed = built
    assert "absent from the `packages` configuration" not in printed
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"contrafed", "hydra_plugins", "contrafed-0.2.0.dist-info"}
    assert "contrafed/py.typed" in names
    ours = set()
    for top in PACKAGES:
        for path in (ROOT / top).rglob("*"):
            if path.suffix in (".py", ".yaml", ".csv"):
                name = path.relative_to(ROOT).as_posix()
                ours.add(f"contrafed/{name}" if top in FOLDERS else name)
    assert ours == {name for name in names if name.endswith((".py", ".yaml", ".csv"))}
    assert sum(name.endswith(".csv") for name in ours) == 5


def test_the_wheel_says_what_it_is(from_wheel):
    (about,) = from_wheel.parent.glob("lib/*/site-packages/contrafed-*.dist-info")
    distribution = PathDistribution(about)
    assert distribution.entry_points["contrafed"].value == "contrafed.command:command"
    assert distribution.entry_points["contrafed-report"].value == "contrafed.report_command:command"
    assert distribution.metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.parametrize("name", [*FOLDERS, "clients.moon", "strategies.aggregation.mean", "partitions.datasets"])
def test_a_short_name_is_answered_with_the_right_one(monkeypatch, name):
    monkeypatch.syspath_prepend(ROOT)
    folder = name.split(".")[0]
    with pytest.raises(ImportError, match=rf"^'{folder}' is no package of its own\. Fix: import contrafed\.{folder}$"):
        importlib.import_module(name)
    assert importlib.import_module(f"contrafed.{name}").__name__ == f"contrafed.{name}"


def test_the_public_names_are_there_and_an_ide_knows_them():
    tree = ast.parse(Path(contrafed.__file__).read_text(encoding="utf-8"))
    (typed,) = (item for item in tree.body if isinstance(item, ast.If) and ast.unparse(item.test) == "TYPE_CHECKING")
    homes = {alias.name: item.module for item in typed.body for alias in item.names}
    assert homes == contrafed._MODULES
    assert sorted(homes) == contrafed.__all__
    assert {"Client", "FederatedStrategy", "LocalTraining", "Config", "compose", "run", "UserError"} == set(homes)
    assert set(homes) <= set(dir(contrafed))
    for name, home in homes.items():
        assert getattr(contrafed, name) is getattr(importlib.import_module(home), name), name
    with pytest.raises(AttributeError, match="module 'contrafed' has no attribute 'LocalWork'"):
        _ = contrafed.LocalWork


def test_nothing_heavy_is_imported_before_it_is_used(tmp_path):
    code = """
import sys
import contrafed
from contrafed import UserError, compose, run
compose("strategy=pmfl")
assert not {"torch", "flwr", "ray", "matplotlib", "pandas"} & set(sys.modules), sorted(sys.modules)
from contrafed import Client
assert "torch" in sys.modules
"""
    done = call_program(sys.executable, "-c", code, folder=tmp_path, path=str(ROOT))
    assert done.returncode == 0, done.stderr


SCRIPT = """
import sys
import core, models, clients, strategies, conf
from contrafed import compose, run
import contrafed
print(contrafed.__file__)
for engine in (["engine=local"], ["engine=ray", "engine.workers=1"]):
    folder = engine[0].removeprefix("engine=")
    print(run(compose("strategy=pmfl", *engine, *sys.argv[1:], f"output_dir={folder}"))["status"])
assert [core.mine, models.mine, clients.mine, strategies.mine, conf.mine] == [True] * 5
"""


@pytest.mark.slow
@pytest.mark.parametrize("programs", ["checkout", "wheel"], indirect=True)
def test_a_script_trains_beside_files_that_have_our_folders_names(programs, tmp_path):
    program, path, home = programs
    for name in ("core", "models", "clients", "strategies", "conf"):
        (tmp_path / f"{name}.py").write_text("mine = True\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = call_program(program / "python", "script.py", *SMALL_RUN, folder=tmp_path, path=path)
    assert done.returncode == 0, done.stderr
    file, *_, last = done.stdout.splitlines()
    assert Path(file).is_relative_to(home)
    assert last == "finished"
    assert done.stdout.splitlines().count("finished") == 2
    metrics = [(tmp_path / engine / "metrics.csv").read_bytes() for engine in ("local", "ray")]
    assert metrics[0] == metrics[1]
    found = accuracies(tmp_path / "local")
    assert found[2] > found[0] + 0.1


@pytest.mark.slow
def test_an_editable_install_trains_from_another_folder(editable, source, tmp_path):
    done = call_program(editable / "contrafed", "strategy=pmfl", "engine=local", *SMALL_RUN, "output_dir=here", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("everything is in here\n")
    found = accuracies(tmp_path / "here")
    assert found[2] > found[0] + 0.1
    where = call_program(editable / "python", "-c", "import contrafed.clients.pmfl as m; print(m.__file__)", folder=tmp_path)
    assert where.stdout == f"{source}/clients/pmfl.py\n", where.stderr


@pytest.mark.parametrize("programs", ["wheel", *(slow(how) for how in ("checkout", "editable"))], indirect=True)
def test_hydra_finds_our_sweeper(programs, tmp_path):
    program, path, home = programs
    code = """
import sys
from hydra.core.plugins import Plugins
Plugins.instance()
print(sys.modules["hydra_plugins.contrafed_sweeper"].__file__)
"""
    done = call_program(program / "python", "-c", code, folder=tmp_path, path=path)
    assert Path(done.stdout.strip()).is_relative_to(home), done.stderr


def test_the_command_outside_the_clone_says_where_its_choices_are(from_wheel, tmp_path):
    shown = call_program(from_wheel / "contrafed", "--help", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "\n  contrafed strategy=pmfl participation=markovian " in shown.stdout
    (conf,) = from_wheel.parent.glob("lib/*/site-packages/contrafed/conf")
    assert f"are in {conf}/GROUP/CHOICE.yaml" in shown.stdout
    wrong = call_program(from_wheel / "contrafed", "strategy=pfml", folder=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: unknown strategy 'pfml', did you mean 'pmfl'?")


@pytest.mark.slow
def test_the_first_run_of_the_readme_from_the_wheel(from_wheel, tmp_path):
    """Run ``contrafed strategy=pmfl participation=markovian`` completely, with figures and tables."""
    done = call_program(from_wheel / "contrafed", "strategy=pmfl", "participation=markovian", folder=tmp_path, timeout=3000)
    assert done.returncode == 0, done.stderr
    (summary,) = tmp_path.glob("outputs/**/summary.json")
    found = accuracies(summary.parent)
    assert list(found) == list(range(0, 301, 10))
    assert found[300] > 0.9
    report = call_program(from_wheel / "contrafed-report", str(summary.parent), folder=tmp_path)
    assert report.returncode == 0, report.stderr
