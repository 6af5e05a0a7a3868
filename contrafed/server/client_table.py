"""The table of every node's last update, which FedVARP and MIFA keep on the server."""

from typing import Any

from contrafed.core.tensors import Tensors


class Table:
    """y_k, node k's last update, 0 before its first, and their mean over all K nodes; a rule keeps one.

    As many numbers as K models have, on the server and in its checkpoints.
    """

    def __init__(self, state: dict[str, Any], num_nodes: int) -> None:
        """Start with y = 0 for ``num_nodes`` nodes (K). The tensors live in the rule's ``state``."""
        self.state, self.num_nodes = state, num_nodes
        state["latest"] = {}  # y_k by partition id
        state["mean"] = {}  # float64

    @property
    def mean(self) -> Tensors:
        """The mean of all y, by name; empty while no node has sent any."""
        return dict(self.state["mean"])

    def replace(self, node: int, update: Tensors) -> Tensors:
        """Make ``update`` this node's y_k; return by how much it differs from the one before, in float64."""
        before, mean = self.state["latest"].get(node), self.state["mean"]
        change = {name: value.double() - (0 if before is None else before[name]) for name, value in update.items()}
        for name, value in change.items():
            mean[name] = mean.get(name, 0) + value / self.num_nodes
        self.state["latest"][node] = update
        return change
