"""engine=local: everything runs in this process. Imports no Ray."""

import os
from dataclasses import dataclass
from typing import Annotated

import torch

from contrafed.core.disk import expand_home
from contrafed.core.errors import RunStopped, UserError
from contrafed.core.schema import Range
from contrafed.engines.client_state import ClientStateStore, default_budgets
from contrafed.engines.engine_run import EngineRun, StackSize, stack_size_for
from contrafed.engines.grid import LocalGrid
from contrafed.engines.worker import reuse_memory
from contrafed.training.errors import device_lost
from contrafed.training.workspace import Workspace, default_device, fault_of, install, uninstall


@dataclass(frozen=True)
class Config:
    """Settings of the engine."""

    device: str | None  # null: cuda if there is one, else cpu
    stack_size: StackSize
    memory_device_bytes: Annotated[int, Range(ge=0)] | None  # of client state, on the accelerator, null: half of it
    memory_host_bytes: Annotated[int, Range(ge=0)] | None  # in RAM, null: half of what is available
    memory_folder: str | None  # for other client state, null: the system's folder for temporary files
    round_timeout: Annotated[float, Range(gt=0)] | None  # seconds, checked between steps
    max_norm: Annotated[float, Range(gt=0)] | None  # larger joint L2 norms of a reply's tensors are rejected
    max_norm_ratio: Annotated[float, Range(gt=1)] | None  # also those so many times the median of recent accepted ones

    def __post_init__(self) -> None:
        """Raise ``UserError`` for a device that is missing or lacks what a run needs."""
        if fault := fault_of(self.device):
            raise UserError(f"engine.device={self.device} cannot be used ({fault})")
        folder = expand_home(self.memory_folder)
        if folder is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
            raise UserError(f"engine.memory_folder: {self.memory_folder} is no folder that can be written in")


def run(config: Config, engine_run: EngineRun) -> None:
    """Run with virtual clients in this process."""
    device = config.device or default_device()
    threads = torch.get_num_threads()
    # One thread, as in every worker of the other engines, so that numbers do not depend on the number of cores.
    torch.set_num_threads(1)
    reuse_memory()
    grid = None
    try:
        workspace = Workspace(engine_run.client, device=device, federation=engine_run.federation, model=engine_run.model)
        install(engine_run.client.to_json(), workspace)
        on_device, in_ram = default_budgets(device)
        memory = ClientStateStore(
            on_device if config.memory_device_bytes is None else config.memory_device_bytes,
            in_ram if config.memory_host_bytes is None else config.memory_host_bytes,
            expand_home(config.memory_folder),
        )
        grid = LocalGrid(engine_run.num_clients, stack_size_for(config.stack_size, workspace), memory)
        engine_run.serve(grid)
    except Exception as error:
        if not device_lost(error):
            raise
        # Nothing on it could be written either, for example the model.
        said = " ".join(str(error).split())[:200]
        raise RunStopped(f"the GPU is lost to this process ({said}). Fix: resume=latest, from the last checkpoint") from error
    finally:
        if grid is not None:
            grid.close()
        uninstall()
        torch.set_num_threads(threads)
