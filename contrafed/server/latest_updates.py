"""Keep a table of every client's last update on the server, for FedVARP, FedStale and MIFA."""

from typing import Any

from contrafed.core.tensors import Tensors


class LatestUpdates:
    """y_k, client k's last update, 0 before its first, and their mean over all K clients. A strategy has one table.

    The server and its checkpoints hold as many numbers as K models have.
    """

    def __init__(self, state: dict[str, Any], num_clients: int) -> None:
        """Start with y = 0 for ``num_clients`` clients (K). The tensors are in the strategy's ``state``."""
        self.state, self.num_clients = state, num_clients
        state["latest"] = {}  # y_k by partition id
        state["mean"] = {}  # float64

    @property
    def mean(self) -> Tensors:
        """The mean of all y, by name, empty before the first update."""
        return dict(self.state["mean"])

    def latest(self, client: int) -> Tensors | None:
        """Return this client's y_k, None before its first update."""
        found: Tensors | None = self.state["latest"].get(client)
        return found

    def replace(self, client: int, update: Tensors) -> Tensors:
        """Set this client's y_k to ``update``, and return the difference from the previous one, in float64."""
        before, mean = self.state["latest"].get(client), self.state["mean"]
        change = {name: value.double() - (0 if before is None else before[name]) for name, value in update.items()}
        for name, value in change.items():
            mean[name] = mean.get(name, 0) + value / self.num_clients
        self.state["latest"][client] = update
        return change
