"""Server and client apps as processes on loopback: SuperLink, three SuperNodes, ``flwr run``."""

import contextlib
import json
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
from helpers import config_of, read_rows, same
from messages import ROOT
from safetensors import SafetensorError
from safetensors.torch import load_file

from contrafed.core.errors import UserError
from contrafed.deploy import certificates
from contrafed.runs.run import run
from contrafed.runs.setup import compose_deployed_run

PACKAGES = ("contrafed", "strategies", "clients", "models", "partitions", "conf", "hydra_plugins")
ROUNDS = 6
QUIET_ENVIRONMENT = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
SMALL_RUN = (
    "num_clients=3", f"num_rounds={ROUNDS}", "eval_every=1", "participation=full", "model=mlp", "model.hidden=[12]",
    "partition.min_client_size=5", "partition.test_fraction=0.2", "engine=local",
)  # fmt: skip


def app_folder(folder):
    """Return a copy of a fresh checkout, so that no build file gets into the FAB."""
    folder.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("main.py", "report.py", "pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    (folder / "tests" / "helpers.py").write_text("")
    return folder


def command(name):
    return str(Path(sys.executable).parent / name)


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_for(what, ready, seconds=60):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if ready():
            return
        time.sleep(0.2)
    raise AssertionError(f"{what} is not there after {seconds} s")


def listens(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


class Federation:
    """A SuperLink with TLS and node authentication, and three SuperNodes with separate keys, as processes."""

    def __init__(self, folder):
        self.folder, self.processes = folder, {}
        self.link, *self.ports = free_ports(5)
        self.fleet = self.link  # the port that devices connect to
        self.keys = folder / "keys"
        assert certificates.main([str(self.keys), "--host", "127.0.0.1", "--clients", "4"]) == 0

    def environment(self, name):
        home = self.folder / f"{name}-home"
        home.mkdir(exist_ok=True)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # Flower starts its helpers by name
        return os.environ | QUIET_ENVIRONMENT | {"FLWR_HOME": str(home), "PATH": path}

    def start(self, name, *arguments):
        with open(self.folder / f"{name}.log", "a") as log:
            self.processes[name] = subprocess.Popen(
                arguments, env=self.environment(name), cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def start_server(self):
        self.start(
            "server", command("flower-superlink"), "--host", "127.0.0.1", "--port", str(self.link),
            "--ssl-ca-certfile", str(self.keys / "ca.pem"), "--ssl-certfile", str(self.keys / "server.pem"),
            "--ssl-keyfile", str(self.keys / "server.key"), "--enable-supernode-auth",
            "--database", str(self.folder / "state.db"), "--disable-runtime-dependency-installation",
        )  # fmt: skip
        wait_for("the SuperLink", lambda: listens(self.link))
        self.operator = self.environment_of("operator", self.link, f'root-certificates = "{self.keys}/ca.pem"')

    def environment_of(self, name, port, security):
        """Return the environment of somebody whose ``flwr`` connects to a port."""
        found = self.environment(name)
        connection = f'[superlink]\ndefault = "mine"\n[superlink.mine]\naddress = "127.0.0.1:{port}"\n{security}\n'
        (self.folder / f"{name}-home" / "config.toml").write_text(connection)
        return found

    def flwr(self, *arguments):
        found = subprocess.run([command("flwr"), *arguments], env=self.operator, capture_output=True, text=True, timeout=120)
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    def start_client(self, k, *, name=None, key="client-{k}", root="ca.pem", patient=False):
        retries = () if patient else ("--max-retries", "3")
        authentication = ("--auth-supernode-private-key", str(self.keys / key.format(k=k))) if key else ()
        self.start(
            name or f"client{k}", command("flower-supernode"), "--superlink", f"127.0.0.1:{self.fleet}",
            "--root-certificates", str(self.keys / root), *authentication, *retries,
            "--host", "127.0.0.1", "--port", str(self.ports[k]),
            "--node-config", f"partition-id={k} state-dir=\"{self.folder}/state{k}\"",
        )  # fmt: skip

    def start_clients(self, count=3, **how):
        """Register the keys of clients, and start their SuperNodes."""
        for k in range(count):
            self.flwr("supernode", "register", str(self.keys / f"client-{k}.pub"), "mine")
            self.start_client(k, **how)

    def kill(self, name):
        """Kill the SuperNode and all processes that it started."""
        os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes.pop(name).wait()

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def memory(self, k):
        """Return the run id and the tensors of client k's state on its disk now, or None without any."""
        for path in (self.folder / f"state{k}" / "client_state").glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError, SafetensorError):  # replaced or removed this moment
                return path.name.partition("-")[0], load_file(path)
        return None

    @contextlib.contextmanager
    def running(self, overrides):
        """Run ``flwr run`` with Hydra overrides. The body of the block waits for it."""
        arguments = [command("flwr"), "run", str(self.folder / "app"), "mine", "--stream"]
        with open(self.folder / "run.log", "w") as log:
            process = subprocess.Popen(
                [*arguments, "--run-config", f'overrides="{overrides}"'], env=self.operator, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            try:
                yield
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def stop(self):
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    one = Federation(tmp_path_factory.mktemp("deployment"))
    try:
        app_folder(one.folder / "app")
        one.start_server()
        one.start_clients()
        yield one
    finally:
        one.stop()


def wait_for_summary(folder):
    wait_for("the summary", (folder / "summary.json").exists, 1200)
    return json.loads((folder / "summary.json").read_text())


def failures_by_round(folder):
    return {int(row["round"]): int(row["value"]) for row in read_rows(folder / "metrics.csv") if row["metric"] == "failures"}


BATCHNORM = "model=cnn_bn model.channels=[3] model.kernel=3 model.hidden=[8] strategy.local.last_batch=merge"


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        "strategy=pmfl",
        "strategy=fedcrl",
        f"strategy=fedavg eval_clients=true {BATCHNORM} model.buffers=average",
        f"strategy=fedavg eval_clients=true {BATCHNORM} model.buffers=local",
        "strategy=fedper partition.feature_shift.kind=rotation",
    ],
)
def test_devices_equal_the_local_engine_bit_for_bit(tmp_path, federation, asked):
    small = [key for key in SMALL_RUN if not (key.startswith("model") and "model=" in asked)]
    with federation.running(f"{asked} {' '.join(small)} output_dir={tmp_path}/devices"):
        assert wait_for_summary(tmp_path / "devices")["status"] == "finished"
    assert run(config_of(*asked.split(), *small, f"output_dir={tmp_path}/local"))["failures"] == 0
    assert same(*(load_file(tmp_path / f / "model.safetensors") for f in ("devices", "local")))
    for log in ("metrics.csv", "clients.csv"):
        assert (tmp_path / "devices" / log).read_bytes() == (tmp_path / "local" / log).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pmfl", "fedcrl"])
def test_a_killed_client_comes_back_with_its_memory_and_the_run_goes_on(tmp_path, federation, name):
    """Client 1 loses power in round 2, while it trains, and is started again once the failure is counted."""
    out, before = tmp_path / "devices", len(federation.log("client1"))
    rounds = []

    def look():
        found = federation.memory(1)
        rounds.append(None if found is None else int(found[1]["participations"]))
        return (out / "summary.json").exists()

    with federation.running(f"strategy={name} {' '.join(SMALL_RUN)} output_dir={out}"):
        wait_for("round 2 at client 1", lambda: "ROUND 2]" in federation.log("client1")[before:], 300)
        federation.kill("client1")
        kept = federation.memory(1)
        wait_for("the failure", lambda: out.exists() and failures_by_round(out).get(2), 150)
        federation.start_client(1)
        wait_for("the summary", look, 400)
    summary = wait_for_summary(out)
    failed = failures_by_round(out)
    assert summary["status"] == "finished"
    assert failed[2] == (2 if name == "fedcrl" else 1)  # FedCRL's clients are also asked to evaluate
    away = sum(count > 0 for count in failed.values())
    assert sorted(failed) == list(range(1, ROUNDS + 1))
    assert all(failed[t] == 0 for t in range(2 + away, ROUNDS + 1))  # absent in consecutive rounds, then present
    assert away < ROUNDS - 2  # at least two rounds after its return
    # Its state is of its first round alone when it returns. Every later round adds to it.
    trained = [count for count in rounds if count is not None]
    assert int(kept[1]["participations"]) == 1
    assert trained[0] == 1
    assert max(trained) == ROUNDS - away
    assert "state_lost" not in (out / "metrics.csv").read_text()
    assert "rejected; the first: client 1" in (federation.folder / "run.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"key": None}, "All SuperNodes must be registered"),
        ({"key": "client-3"}, "Failed to activate SuperNode"),
        ({"root": "other.pem"}, "certificate verify failed"),
    ],
    ids=["no key", "a key nobody registered", "another root certificate"],
)
def test_a_client_that_is_not_known_is_refused(federation, tmp_path, how, says):
    assert certificates.main([str(tmp_path / "keys"), "--host", "127.0.0.1"]) == 0
    shutil.copy(tmp_path / "keys" / "ca.pem", federation.keys / "other.pem")
    name = f"stranger-{tmp_path.name}"
    federation.start_client(3, name=name, **how)
    try:
        federation.processes[name].wait(60)
    finally:
        federation.kill(name) if federation.processes[name].poll() is None else federation.processes.pop(name)
    log = federation.log(name)
    assert "Failed to initialize the connection to the SuperLink" in log
    assert says in log
    assert "SuperNode ID" not in log


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Return the Flower app bundle of ``flwr build``."""
    app = app_folder(tmp_path_factory.mktemp("bundle") / "app")
    built = subprocess.run(
        [command("flwr"), "build"], cwd=app, env=os.environ | QUIET_ENVIRONMENT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    (fab,) = app.glob("*.fab")
    return zipfile.ZipFile(fab)


def test_the_fab_holds_what_a_client_needs_and_nothing_else(bundle):
    names = set(bundle.namelist())
    ours = {str(p.relative_to(ROOT)) for d in PACKAGES for p in (ROOT / d).rglob("*") if p.suffix in (".py", ".yaml")}
    assert names - ours <= {"pyproject.toml", "LICENSE", "README.md", ".info/CONTENT"}
    assert ours <= names


def test_the_fab_is_imported_and_trains(bundle, tmp_path):
    """As in Flower: unpacked, with its folder first on the path and the apps by their names in pyproject.toml."""
    # A local run imports no Ray.
    bundle.extractall(tmp_path / "app")
    code = """
import sys
from importlib import import_module
from pathlib import Path
import tomllib
app = Path(sys.argv.pop(1))
sys.path.insert(0, str(app))
for name in tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["components"].values():
    module, _, attribute = name.partition(":")
    assert getattr(import_module(module), attribute)
from contrafed.command import command
try:
    command()
finally:
    ours = [m for name, m in sys.modules.items() if name.partition(".")[0] == "contrafed"]
    assert "contrafed.clients.pmfl" in sys.modules
    assert "ray" not in sys.modules
    assert all(Path(m.__file__).is_relative_to(app) for m in ours if m.__file__)
"""
    asked = [sys.executable, "-c", code, str(tmp_path / "app"), "strategy=pmfl", *SMALL_RUN, "num_rounds=1", "output_dir=here"]
    done = subprocess.run(asked, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\n1,global,test,accuracy," in (tmp_path / "here" / "metrics.csv").read_text()


def test_overrides_of_a_deployment_are_checked(tmp_path):
    ready = compose_deployed_run(f"strategy=fedcrl num_clients=3 output_dir={tmp_path}/run")
    assert (ready.client.strategy.name, ready.num_clients, ready.folder) == ("fedcrl", 3, tmp_path / "run")
    with pytest.raises(UserError, match="^checkpoint_every"):
        compose_deployed_run("checkpoint_every=3 engine=local num_clients=3", 3)
