"""engine=flower: Flower's own simulation runtime, unmodified; the proof that nothing depends on our Grid."""

import logging
import warnings
from dataclasses import dataclass
from typing import Annotated

from clients.node.app import app
from clients.training.workspace import Workspace, default_device, install, uninstall
from core.config import Range
from simulation.engine import Job

# Seconds that an interrupted run has to write what it holds.
FAREWELL = 60.0


@dataclass(frozen=True)
class Config:
    """Settings of the engine."""

    cpus_per_node: Annotated[float, Range(gt=0)]
    gpus_per_node: Annotated[float, Range(ge=0)]
    round_timeout: Annotated[float, Range(gt=0)] | None  # seconds
    max_norm: Annotated[float, Range(gt=0)] | None  # replies whose tensors' joint L2 norm is larger are rejected


def run(config: Config, job: Job) -> None:
    """Run a job in Flower's simulation runtime, one CPU per ClientApp by default."""
    from flwr.simulation import run_simulation

    import contrafed.server_app as server
    from simulation.ray import stop_ray

    stop_ray()  # Flower starts its own with its own resources
    install(job.node.to_json(), Workspace(job.node, device=default_device(), federation=job.federation))
    hosted, verbose = server.hosted, job.verbose
    assert hosted is not None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            run_simulation(
                server_app=job.server_app,
                client_app=app,
                num_supernodes=job.num_nodes,
                backend_config={
                    "client_resources": {"num_cpus": config.cpus_per_node, "num_gpus": config.gpus_per_node},
                    "init_args": {"include_dashboard": False, "log_to_driver": verbose},
                },
                verbose_logging=verbose,
            )
    except KeyboardInterrupt:
        if not verbose:  # Flower's threads complain about the workers that go away
            logging.getLogger("flwr").setLevel(logging.CRITICAL)
        hosted.stop.set()
        hosted.done.wait(FAREWELL)
        raise
    finally:
        uninstall()
