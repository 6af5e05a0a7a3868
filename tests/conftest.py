import os

import pytest
import torch

from contrafed.reporting import quiet_libraries

quiet_libraries(verbose=False)
# The tests compare bits: one thread, as in a run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _no_ray_left_over():
    yield
    from simulation.ray import stop_ray

    stop_ray()


@pytest.fixture
def no_figures(monkeypatch):
    """Runs draw nothing: figures take half a second, and what a test looks at is not in them."""
    from contrafed.reporting import RunRecorder

    monkeypatch.setattr(RunRecorder, "_draw", lambda self: None)
