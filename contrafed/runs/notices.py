"""Write the notices that are printed with a run: reduced scale, simulated attackers, weak privacy settings."""

import math
from typing import Any

import numpy as np

from contrafed.config.compose import composition
from contrafed.config.run_config import Run
from contrafed.core.display_names import name_method, name_value
from contrafed.core.privacy import gaussian
from contrafed.data.images import ImageData
from contrafed.data.loaded import name_classes
from contrafed.data.shifted_partition import ShiftedPartition
from contrafed.engines.attack import Attackers
from contrafed.server.base import FederatedStrategy
from contrafed.server.chunks import CHUNK_CLIENTS, find_obstacle
from contrafed.training.workspace import Workspace

# A client with more of all examples is warned of.
LARGE_SHARE = 0.5
# With a larger share of the training examples that no client has, a line says it.
LARGE_REST = 0.01


def said_of_scale(run: Run, workspace: Workspace) -> str:
    """Return the notice that marks every output of a run on reduced scale or replaced images, empty for others."""
    scale, stand_in = run.composed.get("scale"), workspace.federation.data.stand_in
    what = "images" if workspace.kind == "image" else "data"
    images = f"{stand_in} {what} in place of {run.client.dataset.name}" if stand_in else ""
    return ", ".join(filter(None, [f"scale={scale}" if scale else "", images]))


def said_of_run(run: Run) -> str:
    """Return the title of a run's figures: method, data set, participation and seed, with display names."""
    method, dataset = name_method(composition(run.composed["strategy"])), name_value("dataset.name", run.client.dataset.name)
    participation = name_value("participation.name", run.participation.name)
    return f"{method} on {dataset}, {participation} participation, seed {run.seed}"


def write_title(run: Run, note: str) -> str:
    """Return the first line of a run, with the ``note`` of its scale."""
    text = f"{composition(run.composed['strategy'])} on {run.client.dataset.name}, {run.participation.name} participation"
    return f"{text} ({note})" if note else text


def said_of_small(workspace: Workspace) -> str:
    """Return a line about clients that had too few examples, empty without any."""
    small, partition = workspace.federation.partition.small, workspace.run.partition
    if not small.clients:
        return ""
    what = f"{small.moved} were moved to them" if small.moved else f"they are left out, with {small.dropped} examples"
    least = partition.config.min_client_size
    return f"{small.clients} clients had drawn fewer than partition.min_client_size={least} examples: {what}"


def said_of_undealt(workspace: Workspace) -> str:
    """Return a line about clients without training examples and about examples without a client, if nothing else says it."""
    partition, data = workspace.federation.partition, workspace.federation.data
    empty, lines = int((partition.sizes == 0).sum()), list[str]()
    if workspace.run.partition.name == "own":  # clients have examples that the server does not see
        return ""
    if empty and not partition.small.clients:
        lines.append(f"{empty} of {partition.num_clients} clients have no training examples and never train")
    many = partition.undealt > LARGE_REST * float((~data.held_out).sum())
    if many and partition.owners is None and not partition.small.dropped:
        lines.append(f"{partition.undealt} training examples belong to no client")
    return "; ".join(lines)


def said_of_absent(strategy: FederatedStrategy) -> str:
    """Return a line about clients that are available in no round, empty without any."""
    absent, clients = strategy.participation.num_never_available, strategy.participation.num_clients
    return f"participation: {absent} of {clients} clients are never available" if absent else ""


def said_of_owners(workspace: Workspace) -> str:
    """Return a line about owners of the data that are no clients, empty without any."""
    counts = workspace.federation.partition.owners
    if counts is None or counts.clients == counts.owners:
        return ""
    clients = f"{counts.clients} of {counts.owners} owners are clients"
    return f"{clients}, with {counts.drawn} of {counts.examples} training examples"


def said_of_scarcity(workspace: Workspace) -> str:
    """Return a line with the share of training examples that clients really keep under scarcity, empty without scarcity."""
    config, shares = workspace.run.partition.config, workspace.federation.partition.kept_shares
    few = config.scarce_clients
    groups = [(config.keep_fraction, "clients keep", shares[0])] if few < workspace.run.num_clients else []
    groups += [(config.scarce_fraction, f"the last {few} clients keep", shares[1])] if few else []
    said = [f"{who} {share:.3g} of their training examples" for wanted, who, share in groups if wanted < 1]
    return f"scarcity: {', '.join(said)}, and at least one of each class" if said else ""


def describe_partition(workspace: Workspace) -> list[str]:
    """Return lines about the partition, some of them empty: owners without a client, small clients, and scarcity."""
    return [said(workspace) for said in (said_of_owners, said_of_small, said_of_undealt, said_of_scarcity)]


def said_of_norms(workspace: Workspace) -> str:
    """Return a line where a method treats normalisation layers apart and the model has none, empty otherwise."""
    parts = workspace.client_class.shared_parts(workspace.config)
    if not {"norm", "!norm"} & set(parts) or workspace.model.normalisation_names:
        return ""
    run = workspace.run
    return f"strategy={run.strategy.name}: model={run.model.name} has no normalisation layer, so there is none that stays local"


def said_of_shift(workspace: Workspace) -> str:
    """Return a line about the clients' feature shifts, empty without any."""
    partition = workspace.federation.partition
    if not isinstance(partition, ShiftedPartition):
        return ""
    low, high = partition.shifts.min(), partition.shifts.max()
    units = {"rotation": "degrees", "brightness": "times", "blur": "pixels (std)", "noise": "of the grey levels (std)"}
    central = "; the central test images are not shifted" if len(workspace.federation.central_test) else ""
    return f"feature shift: {partition.config.kind} by {low:.3g} to {high:.3g} {units[partition.config.kind]}{central}"


def describe_model(workspace: Workspace) -> list[str]:
    """Return lines about the model: how images are adapted to it, its initial weights, and what of it is frozen."""
    model, shape = workspace.model, workspace.federation.data.x.shape
    lines, changes = [*model.notices], []
    if model.takes_channels:
        changes.append(f"repeated in {model.takes_channels} channels")
    if model.image_size is not None and model.image_size != tuple(shape[2:]):
        changes.append(f"resized from {shape[2]}x{shape[3]} to {'x'.join(map(str, model.image_size))}")
    if changes:
        lines.append(f"model={workspace.run.model.name}: images are {' and '.join(changes)}")
    return lines


def said_of_attackers(run: Run) -> str:
    """Return a line about the number of attackers, empty without any."""
    count = len(list_attackers(run))
    return f"{count} of {run.num_trained} clients attack: attack={run.attack.name}" if count else ""


def list_attackers(run: Run) -> tuple[int, ...]:
    """Return the clients of a run that train and attack, ascending."""
    config = run.attack.config
    return config.among(run.num_trained, run.seed) if isinstance(config, Attackers) else ()


def said_of_untrained_classes(run: Run, data: ImageData, counts: np.ndarray) -> str:
    """Return a line about classes of held-out clients that no client trains on, empty without any.

    Args:
        run: The run.
        data: The data, which may name the classes.
        counts: Training examples of each client and class (K, C), also those of held-out clients.
    """
    if not run.held_out_clients:
        return ""
    lacking = np.logical_and(counts[run.num_trained :].any(0), ~counts[: run.num_trained].any(0))
    if not lacking.any():
        return ""
    classes = name_classes(data, lacking, ("has", "have"))
    return f"held_out_clients: {classes} examples on held-out clients only, so no model learns them. Fix: another partition"


def warn_of_large(sizes: np.ndarray, own_data: bool) -> str:
    """Return a line about a client that says it has most of all examples, empty where none does or the server dealt them."""
    share = float(sizes.max() / max(sizes.sum(), 1)) if own_data and len(sizes) > 2 else 0.0
    where = f"client {int(sizes.argmax())} says that it has {share:.0%} of all training examples"
    return f"{where}: it may weigh that much in the global model" if share > LARGE_SHARE else ""


def said_of_delta(run: Run) -> str:
    """Return a line about a large delta, for which epsilon promises little: it allows one client's data to be published."""
    delta = run.privacy.config.delta if isinstance(run.privacy.config, gaussian.Gaussian) else 0
    loose = delta * run.num_clients >= 1
    return (
        f"privacy.delta={delta:g} is not below 1/num_clients={1 / run.num_clients:g}: epsilon says little there"
        if loose
        else ""
    )


def said_of_replies(run: Run, strategy: FederatedStrategy) -> str:
    """Return a line about the memory for the replies of a round, if a large cohort cannot be summed in chunks."""
    cohort = strategy.participation.select or run.num_trained
    if cohort <= CHUNK_CLIENTS or not (obstacle := find_obstacle(strategy)):
        return ""
    size = cohort * 4 * sum(map(math.prod, strategy.upload_spec.values()))
    return f"up to {cohort} replies of a round are in memory at once, {size / 1e9:.2g} GB: {obstacle}"


def said_of_attack(run: Run) -> dict[str, Any]:
    """Return attackers, attack and aggregation for the summary, empty without them."""
    found: dict[str, Any] = {} if run.aggregation.name == "mean" else {"aggregation": run.aggregation.name}
    if isinstance(run.attack.config, Attackers):
        found |= {"attack": run.attack.name, "attackers": list(list_attackers(run))}
    return found
