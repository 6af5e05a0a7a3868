"""``flwr run`` in Flower's simulation, with the unchanged app and a SuperLink on separate ports."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import config_of, same
from safetensors.torch import load_file
from test_deployment import QUIET_ENVIRONMENT, app_folder, command, free_ports, listens, wait_for

from contrafed.runs.run import run
from contrafed.runs.setup import compose_deployed_run

APPS = ("contrafed/runs/server_app.py", "contrafed/client_app/app.py")
SMALL_RUN = "strategy=pmfl num_rounds=2 eval_every=1 participation=full model=mlp model.hidden=[12]"


def processes_of(home):
    """Return the ids of the processes whose environment names ``home``, which Flower leaves behind."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"FLWR_HOME={home}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return found


@pytest.fixture
def flwr(tmp_path):
    """Run ``flwr run`` with Hydra overrides, and return its output."""
    app, home, ports = app_folder(tmp_path / "app"), tmp_path / "home", free_ports(2)
    home.mkdir()
    for name in APPS:  # each notes where it was imported from
        with open(app / name, "a") as file:
            file.write(f"\nwith open({str(home / 'imported')!r}, 'a') as _file:\n    print(__file__, file=_file)\n")
    own = {
        "FLWR_HOME": str(home), "PATH": f"{Path(command('flwr')).parent}{os.pathsep}{os.environ['PATH']}",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(ports[0]), "FLWR_LOCAL_CONTROL_API_PORT": str(ports[1]),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }  # fmt: skip

    def call(overrides):
        arguments = [command("flwr"), "run", str(app), "--stream", "--run-config", f'overrides="{overrides}"']
        # Flower's Ray workers look first in the folder where flwr is started, so it is not the app's.
        found = subprocess.run(
            arguments, env=os.environ | QUIET_ENVIRONMENT | own, cwd=home, capture_output=True, text=True, timeout=900
        )
        return found.stdout + found.stderr

    yield call
    for process in processes_of(home):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    wait_for("the end of Flower's SuperLink", lambda: not listens(ports[0]))


@pytest.mark.slow
def test_a_run_takes_the_federations_number_of_clients_and_equals_local(tmp_path, flwr):
    said = flwr(f"{SMALL_RUN} output_dir={tmp_path}/flwr")
    assert (tmp_path / "flwr" / "summary.json").exists(), said
    summary = json.loads((tmp_path / "flwr" / "summary.json").read_text())
    assert (summary["status"], summary["engine"], summary["num_clients"]) == ("finished", "flower-simulation", 2)
    assert summary["failures"] == 0
    run(config_of(*SMALL_RUN.split(), "num_clients=2", "engine=local", f"output_dir={tmp_path}/local"))
    assert same(*(load_file(tmp_path / name / "model.safetensors") for name in ("flwr", "local")))
    assert (tmp_path / "flwr" / "metrics.csv").read_bytes() == (tmp_path / "local" / "metrics.csv").read_bytes()
    imported = {Path(line) for line in (tmp_path / "home" / "imported").read_text().splitlines()}
    assert all(path.is_relative_to(tmp_path / "home" / "apps") for path in imported), imported
    assert {name for name in APPS for path in imported if path.match(name)} == set(APPS)
    said = flwr(f"{SMALL_RUN} num_clients=50 output_dir={tmp_path}/many")
    assert "error: num_clients=50, but this federation has 2 SuperNodes: set num_clients=2, or flwr run" in said
    assert "Traceback" not in said
    assert not (tmp_path / "many").exists()


def test_the_number_of_clients_is_the_federations_unless_the_overrides_say_otherwise(tmp_path, expect_error):
    assert compose_deployed_run(f"output_dir={tmp_path}/a", 3).num_clients == 3
    assert compose_deployed_run(f"num_clients=3 output_dir={tmp_path}/b", 3).num_clients == 3
    with expect_error("num_clients"):
        compose_deployed_run(f"num_clients=4 output_dir={tmp_path}/c", 3)
    with expect_error("num_clients"):
        compose_deployed_run(f"experiment=pmfl/base output_dir={tmp_path}/d", 3)
