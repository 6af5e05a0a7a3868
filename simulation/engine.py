"""What the engines share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp

from partitions.federation import Federation
from simulation.worker import RUN_ID


@dataclass(frozen=True)
class Job:
    """One run, as an engine receives it."""

    server_app: ServerApp
    settings: Mapping[str, Any]  # the composed configuration
    node_settings: str  # the part of it that nodes receive, as JSON
    run_config: str  # all of it as JSON, for the ServerApp's run config
    federation: Federation

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return int(self.settings["num_nodes"])

    def serve(self, grid: Grid) -> None:
        """Call the ServerApp as Flower would, with the composed configuration in its run config."""
        context = Context(RUN_ID, 0, node_config={}, state=RecordDict(), run_config={"config": self.run_config})
        self.server_app(grid, context)


def stack_size_for(wanted: int | None, device: str, num_nodes: int) -> int:
    """Return how many nodes train as one stack: what was asked for, or 1 on a CPU and all of them on a GPU.

    A CPU gains nothing from stacking convolutions; on a GPU a stack that does not fit is halved when that shows.
    """
    if wanted is not None:
        return wanted
    return 1 if device == "cpu" else num_nodes
