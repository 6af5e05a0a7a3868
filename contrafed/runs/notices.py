"""What is said of a run beside its numbers: what it is no full run of, who attacks, and what its settings promise little of."""

from typing import Any

from contrafed.config.run_config import Run
from contrafed.core.privacy import gaussian
from contrafed.engines.attack import Attackers
from contrafed.training.workspace import Workspace


def said_of_scale(run: Run, workspace: Workspace) -> str:
    """Return what every output says of a run that is no full one on the data set that it names, empty for others."""
    scale, stand_in = run.composed.get("scale"), workspace.federation.data.stand_in
    images = f"{stand_in} images in place of {run.node.dataset.name}" if stand_in else ""
    return ", ".join(filter(None, [f"scale={scale}" if scale else "", images]))


def said_of_small(workspace: Workspace) -> str:
    """Return a line about nodes that had drawn too few examples, empty where there was none."""
    small, partition = workspace.federation.partition.small, workspace.run.partition
    if not small.nodes:
        return ""
    what = f"{small.moved} were moved to them" if small.moved else f"they are left out, with {small.dropped} examples"
    return f"{small.nodes} nodes had drawn fewer than partition.min_node_size={partition.config.min_node_size} examples: {what}"


def said_of_norms(workspace: Workspace) -> str:
    """Return a line where a method treats normalisation layers apart and the model has none, empty otherwise."""
    parts = workspace.client_class.shared_parts(workspace.config)
    if not {"norm", "!norm"} & set(parts) or workspace.model.normalisation_names:
        return ""
    run = workspace.run
    return f"strategy={run.strategy.name}: model={run.model.name} has no normalisation layer, so there is none that stays local"


def said_of_attackers(run: Run) -> str:
    """Return a line about how many nodes attack, empty where none does."""
    config = run.attack.config
    attackers = config.among(run.num_nodes, run.seed) if isinstance(config, Attackers) else ()
    count = sum(attacker < run.num_trained for attacker in attackers)
    return f"{count} of {run.num_trained} nodes attack: attack={run.attack.name}" if count else ""


def said_of_delta(run: Run) -> str:
    """Return a line about a delta at which epsilon promises little: one node's data may be published whole with it."""
    delta = run.privacy.config.delta if isinstance(run.privacy.config, gaussian.Gaussian) else 0
    loose = delta * run.num_nodes >= 1
    return f"privacy.delta={delta:g} is not below 1/num_nodes={1 / run.num_nodes:g}: epsilon says little there" if loose else ""


def said_of_attack(run: Run) -> dict[str, Any]:
    """Return who attacks and how, and what stands in for the mean, for the summary; nothing where nobody does."""
    found: dict[str, Any] = {} if run.aggregation.name == "mean" else {"aggregation": run.aggregation.name}
    if isinstance(run.attack.config, Attackers):
        attackers = run.attack.config.among(run.num_nodes, run.seed)
        found |= {"attack": run.attack.name, "attackers": list(attackers)}
    return found
