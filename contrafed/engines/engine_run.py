"""Define what all engines share."""

from dataclasses import dataclass
from typing import Annotated, Literal

from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp

from contrafed.core.client_run import ClientRun
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel
from contrafed.data.federation import Federation
from contrafed.engines.worker import RUN_ID


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


# The clients that train as one stack. ``auto``: a tiny model's on a CPU, all that fit on a GPU (``Workspace.stack_size``).
StackSize = Annotated[int, Range(ge=1)] | Literal["auto"] | None


def stack_size_of(wanted: StackSize) -> int | None:
    """Return the number of clients that a configuration states for a stack, None for ``auto``."""
    return wanted if isinstance(wanted, int) else None
