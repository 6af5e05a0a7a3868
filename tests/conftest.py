import os

import pytest
import torch

from contrafed.reporting import RunRecorder, quiet_libraries

quiet_libraries(verbose=False)
# The tests compare bits: one thread, as in a run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _no_ray_left_over():
    yield
    from simulation.ray import stop_ray

    stop_ray()


@pytest.fixture(autouse=True)
def _no_figures(request, monkeypatch):
    """Runs draw nothing but in tests marked ``figures``: it takes half a second of a run's one."""
    if request.node.get_closest_marker("figures") is None:
        monkeypatch.setattr(RunRecorder, "_draw", lambda self: None)


@pytest.fixture(scope="session")
def local_runs(tmp_path_factory):
    """One run of the tiny experiment per method with engine=local, made when first asked for."""
    from tiny import run_tiny

    done = {}

    def get(method):
        if method not in done:
            done[method] = run_tiny(tmp_path_factory.mktemp(method) / "run", f"strategy={method}", "engine=local")
        return done[method]

    return get


@pytest.fixture
def quick_devices(monkeypatch):
    """Look at inboxes every hundredth of a second."""
    import contrafed.devices
    import simulation.members
    from clients.training.workspace import uninstall

    monkeypatch.setattr(contrafed.devices, "POLL", 0.01)
    monkeypatch.setattr(simulation.members, "POLL", 0.01)
    yield
    uninstall()
