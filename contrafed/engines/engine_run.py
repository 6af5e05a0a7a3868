"""Define what all engines share."""

from dataclasses import dataclass

from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp

from contrafed.core.client_run import ClientRun
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


def stack_size_for(wanted: int | None, device: str, num_clients: int) -> int:
    """Return how many clients train as one stack: ``wanted``, or by default 1 on a CPU and all on a GPU.

    On a CPU only tiny models gain from stacks (docs/BENCHMARKS.md). ``flower`` and devices have none, so the default there is
    what all engines can do with the same bytes. A stack that does not fit on a GPU is halved when it fails.
    """
    if wanted is not None:
        return wanted
    return 1 if device == "cpu" else num_clients
