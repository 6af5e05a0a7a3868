"""The same two apps as processes on loopback: SuperLink, three SuperNodes, ``flwr run``."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from rig import config_of, same
from safetensors.torch import load_file

from contrafed.errors import UserError
from contrafed.experiment import run
from contrafed.prepare import deployed

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("contrafed", "strategies", "clients", "models", "partitions", "simulation", "conf")
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
SMALL = (
    "num_nodes=3", "num_rounds=3", "eval_every=1", "participation=full", "model=mlp", "model.hidden=[12]",
    "partition.min_node_size=5", "partition.test_fraction=0.2", "engine=local",
)  # fmt: skip


def app_folder(folder):
    """A copy of what a fresh checkout has, so that nothing built here gets into the FAB."""
    folder.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("main.py", "pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    (folder / "tests" / "rig.py").write_text("")
    return folder


def command(name):
    return str(Path(sys.executable).parent / name)


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_for(what, ready, seconds=90):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if ready():
            return
        time.sleep(0.2)
    raise AssertionError(f"{what} is not there after {seconds} s")


def listens(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A SuperLink and three SuperNodes; gives (folder of the app, environment of the operator)."""
    folder = tmp_path_factory.mktemp("deployment")
    link, *ports = free_ports(4)
    processes = []

    def start(name, *arguments):
        home = folder / name
        home.mkdir()
        with open(folder / f"{name}.log", "w") as log:
            environment = os.environ | QUIET | {"FLWR_HOME": str(home)}
            processes.append(
                subprocess.Popen(arguments, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True)
            )

    try:
        start(
            "server", command("flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(link),
            "--database", str(folder / "state.db"), "--disable-runtime-dependency-installation",
        )  # fmt: skip
        wait_for("the SuperLink", lambda: listens(link))
        for k, port in enumerate(ports):
            start(
                f"device{k}", command("flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{link}",
                "--host", "127.0.0.1", "--port", str(port), "--node-config", f"partition-id={k} num-partitions=3",
            )  # fmt: skip
        home = folder / "operator"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "loop"\n[superlink.loop]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
        )
        yield app_folder(folder / "app"), os.environ | QUIET | {"FLWR_HOME": str(home)}
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()  # Flower's helpers end when their parent is gone altogether


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pmfl", "fedcrl"])
def test_devices_equal_the_local_engine_bit_for_bit(tmp_path, federation, name):
    app, environment = federation
    overrides = f"strategy={name} {' '.join(SMALL)} output_dir={tmp_path}/devices"
    arguments = [command("flwr"), "run", str(app), "loop", "--stream", "--run-config", f'overrides="{overrides}"']
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(arguments, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for("the summary", (tmp_path / "devices" / "summary.json").exists, 300)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    summary = run(config_of(f"strategy={name}", *SMALL, f"output_dir={tmp_path}/local"))
    assert summary["failures"] == 0
    assert same(*(load_file(tmp_path / f / "model.safetensors") for f in ("devices", "local")))
    for log in ("metrics.csv", "nodes.csv"):
        assert (tmp_path / "devices" / log).read_bytes() == (tmp_path / "local" / log).read_bytes()


def test_the_fab_holds_what_a_node_needs_and_nothing_else(tmp_path):
    app = app_folder(tmp_path / "app")
    subprocess.run([command("flwr"), "build"], cwd=app, env=os.environ | QUIET, check=True, capture_output=True)
    (fab,) = app.glob("*.fab")
    names = set(zipfile.ZipFile(fab).namelist())
    ours = {str(p.relative_to(app)) for d in PACKAGES for p in (app / d).rglob("*") if p.suffix in (".py", ".yaml")}
    assert names - ours <= {"pyproject.toml", "LICENSE", "README.md", ".info/CONTENT"}
    assert ours <= names


def test_overrides_of_a_deployment_are_checked(tmp_path):
    config = deployed(f"strategy=fedcrl num_nodes=3 output_dir={tmp_path}/run")
    assert (config["strategy"]["name"], config["num_nodes"], config["folder"]) == ("fedcrl", 3, f"{tmp_path}/run")
    with pytest.raises(UserError, match="unknown strategy 'fedcrll', did you mean 'fedcrl'"):
        deployed("strategy=fedcrll")
    with pytest.raises(UserError, match="checkpoint_every and resume go with simulation"):
        deployed("checkpoint_every=3 engine=local")
