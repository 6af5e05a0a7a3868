"""Killed processes of a deployment on loopback (SuperLink, ServerApp, SuperNodes), and the run that resumes."""

import builtins
import contextlib
import dis
import os
import random
import re
import runpy
import shutil
import signal
import time
from pathlib import Path

import pytest
from helpers import config_of, read_rows, same
from safetensors.torch import load_file
from test_deployment import Federation, app_folder, wait_for, wait_for_summary
from test_flwr_run import processes_of
from wire import rows_of

import contrafed
from contrafed.runs.run import run

CLIENTS = 2
SMALL_RUN = (
    "strategy=pmfl", f"num_clients={CLIENTS}", "eval_every=1", "participation=full", "model=mlp", "model.hidden=[12]",
    "partition.min_client_size=5", "partition.test_fraction=0.2", "engine=local",
)  # fmt: skip
# Rounds of the soak, and about how many seconds pass between two kills.
SOAK_ROUNDS = int(os.environ.get("CONTRAFED_SOAK_ROUNDS", "200"))
PEACE_SECONDS = 90


@pytest.fixture
def federation(tmp_path):
    one = Federation(tmp_path / "federation")
    try:
        app_folder(one.folder / "app")
        one.start_server()
        one.start_clients(CLIENTS, patient=True)
        yield one
    finally:
        one.stop()
        for home in one.folder.glob("*-home"):
            kill(processes_of(home))


@pytest.fixture(autouse=True)
def _folder(tmp_path):
    (tmp_path / "federation").mkdir()


def kill(processes):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def server_apps(federation):
    """Return the processes of the ServerApp and its launcher, without the SuperLink's own."""
    found = processes_of(federation.folder / "server-home")
    return [p for p in found if b"flwr-serverapp" in read(p, "cmdline")]


def read(process, name):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/{name}").read_bytes()
    return b""


def kill_server_app(federation):
    wait_for("the ServerApp's process", lambda: server_apps(federation))
    kill(server_apps(federation))


def kill_server(federation):
    """Kill the server, and start it again."""
    kill(processes_of(federation.folder / "server-home"))
    federation.processes.pop("server").wait()
    federation.start_server()


def revive(federation):
    """Restart SuperNodes that ended, as a supervisor would. Flower refuses one that returns too early."""
    for k in range(CLIENTS):
        process = federation.processes.get(f"client{k}")
        if process is None or process.poll() is not None:
            federation.start_client(k, patient=True)


def rounds_of(out):
    """Return the last round in the metrics, which are readable at any time."""
    if not (out / "metrics.csv").exists():
        return 0
    return max((int(row["round"]) for row in read_rows(out / "metrics.csv")), default=0)


def reaches(federation, out, server_round, seconds=1800):
    def ready():
        revive(federation)
        return rounds_of(out) >= server_round or (out / "summary.json").exists()

    wait_for(f"round {server_round}", ready, seconds)


@pytest.mark.slow
@pytest.mark.parametrize("pull", [kill_server_app, kill_server], ids=["ServerApp", "SuperLink"])
def test_a_run_whose_server_is_killed_goes_on_to_the_bytes_of_local(tmp_path, federation, pull):
    out = tmp_path / "run"
    overrides = f"{' '.join(SMALL_RUN)} num_rounds=4 checkpoint_every=2 resume=latest output_dir={out}"
    with federation.running(overrides):
        reaches(federation, out, 3)
        pull(federation)
    with federation.running(overrides):
        reaches(federation, out, 4)
        summary = wait_for_summary(out)
    assert summary["status"] == "finished"
    assert summary["resumed_from"].endswith("000002")
    run(config_of(*SMALL_RUN, "num_rounds=4", f"output_dir={tmp_path}/local"))
    assert same(*(load_file(folder / "model.safetensors") for folder in (out, tmp_path / "local")))
    for log in ("metrics.csv", "clients.csv", "participants.csv"):
        assert (out / log).read_bytes() == (tmp_path / "local" / log).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "status"), [(30, "finished"), (100, "interrupted")])
def test_a_superlink_that_is_silent(tmp_path, federation, seconds, status):
    """After a minute without a heartbeat Flower's SuperLink drops the run, which then ends in one line and resumes."""
    out = tmp_path / "run"
    overrides = f"{' '.join(SMALL_RUN)} num_rounds=6 checkpoint_every=1 resume=latest output_dir={out}"
    with federation.running(overrides):
        reaches(federation, out, 2)
        os.kill(federation.processes["server"].pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(federation.processes["server"].pid, signal.SIGCONT)
        wait_for("the summary", lambda: revive(federation) or (out / "summary.json").exists(), 1200)
        summary = wait_for_summary(out)
    print((federation.folder / "run.log").read_text())
    assert summary["status"] == status
    if status != "finished":
        (out / "summary.json").unlink()
        for k in range(CLIENTS):  # a SuperNode that gave up during a TLS handshake neither works nor ends
            federation.kill(f"client{k}")
        kill_server(federation)  # after its silence this SuperLink starts no ServerApp any more
        revive(federation)
        with federation.running(overrides):
            wait_for("the summary", lambda: revive(federation) or (out / "summary.json").exists(), 1200)
            summary = wait_for_summary(out)
        assert (summary["status"], "resumed_from" in summary) == ("finished", True)
    run(config_of(*SMALL_RUN, "num_rounds=6", f"output_dir={tmp_path}/local"))
    assert same(*(load_file(folder / "model.safetensors") for folder in (out, tmp_path / "local")))


@pytest.mark.slow
def test_a_long_run_of_devices_with_random_kills(tmp_path, federation):
    """Under any kills, no round is missing or doubled, and no client loses its state."""
    out, rng, kills = tmp_path / "run", random.Random(0), dict.fromkeys(("client0", "client1", "server", "ServerApp"), 0)
    overrides = f"{' '.join(SMALL_RUN)} num_rounds={SOAK_ROUNDS} checkpoint_every=2 resume=latest output_dir={out}"
    while not (out / "summary.json").exists():
        with federation.running(overrides):
            stopped = False
            while not stopped and not (out / "summary.json").exists():
                ends = time.monotonic() + PEACE_SECONDS * (0.5 + rng.random())
                while time.monotonic() < ends and not (out / "summary.json").exists():
                    revive(federation)
                    rounds_of(out)
                    time.sleep(5)
                what = rng.choice(list(kills))
                if what.startswith("client") and federation.processes[what].poll() is None:
                    federation.kill(what)
                elif what == "server":
                    kill_server(federation)
                elif what == "ServerApp":
                    kill(server_apps(federation))
                kills[what] += 1
                stopped = what in ("server", "ServerApp")
                print(f"{time.strftime('%X')} round {rounds_of(out)}: {kills}", flush=True)
    summary = wait_for_summary(out)
    rows = read_rows(out / "metrics.csv")
    participants = [int(row["round"]) for row in rows if row["metric"] == "participants"]
    assert (summary["status"], participants) == ("finished", list(range(1, SOAK_ROUNDS + 1)))
    assert not [row for row in rows if row["metric"] == "state_lost"]
    trained = [int(federation.memory(k)[1]["participations"]) for k in range(CLIENTS)]
    assert SOAK_ROUNDS * CLIENTS - summary["failures"] <= sum(trained) <= SOAK_ROUNDS * CLIENTS
    assert summary["accuracy_final"] > 0.5 or SOAK_ROUNDS < 40


def peaks(federation):
    """Return the peak memory in MB of the SuperLink and of every process of a ServerApp, by name."""
    found = {}
    for process in processes_of(federation.folder / "server-home"):
        peak = [int(line.split()[1]) for line in read(process, "status").decode().splitlines() if line.startswith("VmHWM")]
        name = b" ".join(read(process, "cmdline").split(b"\0")[1:2]).decode().rpartition("/")[2]
        found[f"{name} {process}"] = peak[0] // 1024 if peak else 0
    return found


HONEST_REPLY = re.compile(r"    return (_reply\(message, up, .*\))\n")  # of the function that trains
LARGE_REPLY_CODE = """\
    reply = REPLY
    if message.metadata.group_id == "2" and _partition_id(context) == 1:
        from flwr.app import Array, ArrayRecord
        import numpy as np
        reply.content[codec.ARRAYS] = ArrayRecord({**codec.to_record(up), next(iter(up)): ARRAY})
    return reply
"""
ARRAYS = {
    "sent": ("Array(np.random.default_rng(0).random(2**29, np.float32))", {1: 0, 2: 1}, {1: 0, 2: 0}),
    "claimed": ("Array('float32', (2**29,), 'numpy.ndarray', b'x' * 64)", {1: 0, 2: 0}, {1: 0, 2: 1}),
}


def make_reply_large(path, array):
    """Change a ClientApp so that client 1 puts ``array`` into its reply of round 2."""
    text = path.read_text()
    (found,) = HONEST_REPLY.finditer(text)
    large = LARGE_REPLY_CODE.replace("REPLY", found[1]).replace("ARRAY}", f"{array}}}")
    path.write_text(text.replace(found[0], large))


def test_the_client_app_can_be_changed_to_send_two_gigabytes(tmp_path):
    path = Path(shutil.copy(Path(contrafed.__file__).parent / "client_app" / "app.py", tmp_path))
    make_reply_large(path, ARRAYS["sent"][0])
    found = runpy.run_path(str(path))
    needed = {each.argval for each in dis.get_instructions(found["train"]) if each.opname == "LOAD_GLOBAL"}
    assert needed <= {*found, *dir(builtins)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARRAYS)
def test_two_gigabytes_cost_that_reply_alone(tmp_path, federation, kind):
    """Client 1 puts 2 GiB into its reply of round 2, or reports so. Only that reply is lost, and no ServerApp grows by them."""
    path, out, highest = federation.folder / "app" / "contrafed" / "client_app" / "app.py", tmp_path / "run", {}
    array, failed, rejected = ARRAYS[kind]
    make_reply_large(path, array)

    def look():
        for name, peak in peaks(federation).items():
            highest[name] = max(highest.get(name, 0), peak)
        revive(federation)
        return (out / "summary.json").exists()

    small = [o for o in SMALL_RUN if not o.startswith("strategy")]
    with federation.running(f"strategy=fedavg {' '.join(small)} num_rounds=3 output_dir={out}"):
        wait_for("the summary", look, 1200)
    print(f"peaks in MB: {highest}\n{(federation.folder / 'run.log').read_text()}")
    metrics = (out / "metrics.csv").read_bytes()
    assert wait_for_summary(out)["status"] == "finished"
    for name, expected in (("failures", failed), ("replies_rejected", rejected)):
        assert {n: c for n, c in rows_of(metrics, name).items() if n < 3} == expected
    assert all(peak < 1500 for name, peak in highest.items() if "serverapp" in name)
