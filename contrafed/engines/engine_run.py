"""Define what all engines share."""

from dataclasses import dataclass
from typing import Annotated, Literal

from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import nn

from contrafed.core.client_run import ClientRun
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel
from contrafed.data.federation import Federation
from contrafed.engines.worker import RUN_ID
from contrafed.training.workspace import Workspace

# Clients trained together. null: 1 on a CPU, as many as fit on a GPU. auto: on a CPU a stack for a tiny model.
StackSize = Annotated[int, Range(ge=1)] | Literal["auto"] | None
# On a CPU a stack saves calls, not arithmetic (docs/BENCHMARKS.md). It saves nothing with more numbers in a model.
MAX_TINY_NUMBERS, TINY_STACK_CLIENTS = 200_000, 24


@dataclass(frozen=True)
class EngineRun:
    """One run, as an engine receives it."""

    server_app: ServerApp
    client: ClientRun  # the clients' part of its configuration
    federation: Federation
    model: SplitModel  # with its initial weights
    verbose: bool  # whether the logs of Flower and Ray are shown

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return self.client.num_clients

    def serve(self, grid: Grid) -> None:
        """Call the ServerApp as Flower would."""
        context = Context(RUN_ID, 0, node_config={}, state=RecordDict(), run_config={})
        self.server_app(grid, context)


def stack_size_for(wanted: StackSize, workspace: Workspace) -> int:
    """Return how many clients train as one stack: ``wanted``, or by default 1 on a CPU and all on a GPU.

    ``flower`` and devices have no stacks, so the default on a CPU is what all engines can do with the same bytes. A stack that
    does not fit on a GPU is halved when it fails. ``auto`` is a pure function of the model and the device. Padded
    batches would change what some networks learn. Those have no stack.
    """
    if workspace.model.one_by_one:
        return 1
    if isinstance(wanted, int):
        return wanted
    if workspace.device.type != "cpu":
        return workspace.run.num_clients
    return TINY_STACK_CLIENTS if wanted == "auto" and is_tiny(workspace.model) else 1


def is_tiny(model: nn.Module) -> bool:
    """Return whether a model has few numbers, and fully connected layers only."""
    layers = [layer for layer in model.modules() if [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]]
    few = sum(value.numel() for value in model.parameters()) <= MAX_TINY_NUMBERS
    return few and all(type(layer) is nn.Linear for layer in layers)
