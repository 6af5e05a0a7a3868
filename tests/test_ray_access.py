"""Nobody else reaches the Ray that a run starts, and its workers get their share of the CPU."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import TINY_RUN, run_tiny

from contrafed.core.errors import UserError
from contrafed.engines import ray_access
from contrafed.engines.ray import start_ray, stop_ray

# A stranger's program: join the Ray at an address, without and with a wrong token, and run a task there.
STRANGER = """
import os, sys
# The last has Ray take 127.0.0.1 for what it is.
os.environ.update({'HOME': '/nonexistent', 'RAY_USAGE_STATS_ENABLED': '0', 'RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER': '0'})
for name in ('RAY_AUTH_MODE', 'RAY_AUTH_TOKEN', 'RAY_AUTH_TOKEN_PATH'):
    os.environ.pop(name, None)
if sys.argv[2] == 'wrong':
    os.environ.update({'RAY_AUTH_MODE': 'token', 'RAY_AUTH_TOKEN': 'f' * 64})
import ray
try:
    ray.init(address=sys.argv[1], logging_level=50)
    print('TASK', ray.get(ray.remote(os.getuid).remote(), timeout=20))
except Exception as error:
    print('REFUSED', type(error).__name__)
os._exit(0)
"""


@pytest.fixture(scope="module")
def own_ray():
    """A Ray that this process started as a run does."""
    stop_ray()
    start_ray(None, False, None, None)
    import ray

    yield ray
    stop_ray()


def listening_addresses():
    """The addresses, as /proc/net/tcp writes them, on which this process and its descendants listen."""
    parents = find_parents()
    family = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    iclients = set()
    for process in family:
        for handle in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError):
                iclients.add(os.readlink(handle).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and row[9] in iclients}


def find_parents():
    """Return process -> parent."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended this moment
            found[int(path.name)] = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
    return found


def test_workers_are_not_nice(own_ray):
    assert own_ray.get(own_ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)


@pytest.mark.slow
@pytest.mark.parametrize("token", ["none", "wrong"])
def test_a_stranger_runs_nothing(own_ray, token):
    """Another process that knows the address. As root it is another user, in a mount namespace of its own."""
    command = [sys.executable, "-c", STRANGER, own_ray.get_runtime_context().gcs_address, token]
    if os.geteuid() == 0:
        command = ["unshare", "-m", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/").stdout
    assert said.startswith("REFUSED")


def test_ray_listens_on_loopback_and_its_folder_is_private(own_ray):
    # 127.0.0.1, and the same mapped to IPv6, in the byte order of the kernel.
    assert listening_addresses() <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert listening_addresses()
    session = Path(own_ray._private.worker._global_node.get_session_dir_path())
    closed = [folder for folder in session.parents if folder.stat().st_mode & 0o077 == 0]
    assert [folder for folder in closed if folder.name.startswith("contrafed-")]
    private = next(folder for folder in closed if folder.name.startswith("contrafed-"))
    stop_ray()
    assert not private.exists()


@pytest.mark.slow
def test_ray_without_a_token_is_not_started():
    program = (
        "import ray\n"
        "from contrafed.core.errors import UserError\n"
        "from contrafed.engines.ray import start_ray\n"
        "try:\n    start_ray(None, False, None, None)\n"
        "except UserError as error:\n    print('refused', error)\n"
        "print('running', ray.is_initialized())\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True, timeout=120)
    assert "refused engine: " in done.stdout
    assert "running False" in done.stdout


def test_a_wrong_address_is_one_line_within_seconds(tmp_path):
    began = time.monotonic()
    with pytest.raises(UserError, match=r"^engine\.address=127\.0\.0\.1:9: "):
        ray_access.probe("127.0.0.1:9")
    with pytest.raises(UserError, match=r"^engine\.address=ray://192\.0\.2\.77:10001: "):  # nobody: reserved for documentation
        ray_access.probe("ray://192.0.2.77:10001")
    assert time.monotonic() - began < 6
    stop_ray()
    with pytest.raises(UserError, match=r"^engine\.address=127\.0\.0\.1:9: "):
        run_tiny(tmp_path / "run", *TINY_RUN, "engine=ray", "engine.address=127.0.0.1:9")


def test_an_address_that_is_not_used_is_reported(monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    ray_access.report_unused_address()
    assert "RAY_ADDRESS=10.0.0.1:6379" in capsys.readouterr().out
    monkeypatch.delenv("RAY_ADDRESS")
    ray_access.report_unused_address()
    assert not capsys.readouterr().out
