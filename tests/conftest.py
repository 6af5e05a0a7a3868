import os

# Tests compare bits, also with a stand-in for a GPU: a real one is seen with CONTRAFED_GPU=1 alone (test_gpu.py).
if not os.environ.get("CONTRAFED_GPU"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import gc
import logging
import shutil
import signal
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from contrafed import command
from contrafed.engines import ray_access
from contrafed.report import plots
from contrafed.runs.output import RunRecorder, quiet_libraries

quiet_libraries(verbose=False)
ray_access.set_token()  # before any test imports Ray
# The tests compare bits: one thread, as in a run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent
DRAW, SAVE = RunRecorder._draw, plots.save


def pytest_collection_finish():
    """Leave what is imported out of later garbage collections, which otherwise take a tenth of the time."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_ray_left_over():
    yield
    from contrafed.engines.ray import stop_ray

    stop_ray()


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_arrives():
    """Let Ctrl-C reach the tests and their children. A shell lets background jobs ignore it, and children inherit that."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def save_empty(figure, stem, dpi=160):
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "pdf")]
    return [path.touch() or path for path in paths]


@pytest.fixture(scope="session", autouse=True)
def _no_figures():
    """Draw no figures, which take longer than a small run. The files of a report's figures are empty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunRecorder, "_draw", lambda self: None)
        patch.setattr(plots, "save", save_empty)
        yield


@pytest.fixture(autouse=True)
def _figures(request, monkeypatch):
    """Draw figures in tests marked ``figures``."""
    if request.node.get_closest_marker("figures") is not None:
        monkeypatch.setattr(RunRecorder, "_draw", DRAW)
        monkeypatch.setattr(plots, "save", SAVE)


@pytest.fixture
def call_command(monkeypatch, capsys):
    """Run the command in this process, which saves five seconds of imports, with the results of a separate process."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", [str(ROOT / "main.py"), *arguments])
        if (ray := sys.modules.get("contrafed.engines.ray")) is not None:  # the instance that later tests use
            monkeypatch.setattr(ray, "stop_ray", lambda: None)
        # Hydra's logging closes every handler that there is, and absl's closes pytest's own standard error with it.
        monkeypatch.setattr(logging, "_handlerList", [])
        capsys.readouterr()
        status = command.main()
        said = capsys.readouterr()
        return SimpleNamespace(returncode=status, stdout=said.out, stderr=said.err)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    handlers, level = list(logging.root.handlers), logging.root.level
    yield call
    # Hydra's handlers write to this test's captured output, which is closed after it.
    logging.root.handlers[:], logging.root.level = handlers, level
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def expect_error(request, tmp_path):
    """Expect an error: ``with expect_error(KEY): ...``."""
    from messages import Refused

    return Refused(request.node.nodeid, tmp_path)


@pytest.fixture(scope="session")
def local_runs(tmp_path_factory):
    """Return one run of the tiny experiment per method with engine=local, made on first use."""
    from tiny import run_tiny

    done = {}

    def get(method):
        if method not in done:
            done[method] = run_tiny(tmp_path_factory.mktemp(method) / "run", f"strategy={method}", "engine=local")
        return done[method]

    return get


@pytest.fixture(scope="session")
def problem(tmp_path_factory):
    """Return the overrides of the small problem with unusual clients."""
    from recording import write_problem

    return write_problem(tmp_path_factory.mktemp("problem"))


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """Return what PMFL's uninterrupted run of tests/stopped.py leaves."""
    from helpers import config_of
    from stopped import SMALL_RUN, outcome

    from contrafed.runs.run import run

    folder = tmp_path_factory.mktemp("whole") / "run"
    run(config_of("strategy=pmfl", *SMALL_RUN, f"output_dir={folder}"))
    return outcome(folder)


@pytest.fixture(scope="session")
def stopped_runs(tmp_path_factory):
    """Return a run that stopped in round 6, made on first use."""
    from stopped import make_stopped_run

    return cache(lambda *overrides: make_stopped_run(tmp_path_factory.mktemp("stopped") / "run", *overrides))


@pytest.fixture
def stop_run(tmp_path, stopped_runs):
    """Return a copy of a run that stopped in round 6, with checkpoints of rounds 2 and 4."""
    return lambda name="pmfl", *more: Path(shutil.copytree(stopped_runs(f"strategy={name}", *more), tmp_path / "run"))


@pytest.fixture
def use_worker(monkeypatch, request):
    """Let Ray start workers of a class of the test's module: ``use_worker(CLASS)``."""
    import ray

    from contrafed.engines import ray as engine

    ray.cloudpickle.register_pickle_by_value(request.module)
    yield lambda kind: monkeypatch.setattr(engine, "Worker", kind)
    ray.cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """Put the test's folder on the path, and unload its modules afterwards."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def quick_devices(monkeypatch):
    """Poll inboxes every hundredth of a second."""
    import contrafed.engines.client_registry
    import contrafed.engines.device_grid
    from contrafed.training.workspace import uninstall

    monkeypatch.setattr(contrafed.engines.device_grid, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(contrafed.engines.client_registry, "POLL_SECONDS", 0.01)
    yield
    uninstall()
