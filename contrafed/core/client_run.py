"""What was chosen for a run, typed: a module and its checked settings for each group, and what of all that a node needs.

``NodeRun`` travels to workers and devices as JSON and is rebuilt there by ``node_run``, which built it in the first place.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from contrafed.core import registry
from contrafed.core.errors import UserError
from contrafed.core.privacy import laplace, local
from contrafed.core.schema import build, convert


@dataclass(frozen=True)
class Choice:
    """What was chosen in a group of the configuration."""

    name: str
    module: ModuleType  # its code
    config: Any  # the module's ``Config``, checked
    values: Mapping[str, Any]  # the composed values behind ``config``, with ``name`` and ``module``


# What becomes of a model's buffers: they are averaged as parameters are, stay on their client, or stay as they begin.
Buffers = Literal["average", "local", "frozen"]

# Where the code behind a group's choices is; of ``strategy`` the node half.
PACKAGES = {
    "strategy": "contrafed.clients",
    "dataset": "contrafed.partitions.datasets",
    "partition": "contrafed.partitions.partitioners",
    "participation": "contrafed.partitions.participation",
    "model": "contrafed.models",
    "engine": "contrafed.engines",
    "privacy": "contrafed.core.privacy",
    "tracker": "contrafed.runs.trackers",
    "attack": "contrafed.strategies.attacks",
    "aggregation": "contrafed.strategies.aggregation",
}

# What the code behind a choice must define, the first of them if it has none, and with which parameters.
FUNCTIONS = {
    "dataset": {"load": "config, name"},
    "partition": {
        "split": "config, draw",
        "explicit": "config, test, num_nodes",
        "lazy": "config, y, pool, num_classes, num_nodes, seed",
    },
    "model": {"build": "config, in_channels, image_size, num_classes"},
}
# What its ``Config`` inherits: settings that Contrafed itself reads.
INHERITED = {
    "dataset": ("contrafed.data.images", "Common"),
    "partition": ("contrafed.data.partition", "Common"),
    "participation": ("contrafed.data.participation", "Selection"),
}


def choose(group: str, values: Mapping[str, Any], module: ModuleType | None = None) -> Choice:
    """Return what ``values``, a group's composed YAML, describe.

    ``module``: its code, where ``values`` do not name it. The group ``strategy`` has the settings of both halves of a method,
    each of which takes its own: the client that ``values`` name, or the strategy in ``module``.
    Raises ``UserError`` for a wrong name, key, type or value, or for code that lacks what its group needs.
    """
    module = module or registry.find(PACKAGES[group], group, values)
    choice = f"{group}={values.get('name')}"
    if group in FUNCTIONS:
        registry.check_functions(module, choice, FUNCTIONS[group])
    if group in INHERITED:
        home, name = INHERITED[group]
        if not issubclass(module.Config, getattr(importlib.import_module(home), name)):
            raise UserError(f"{choice}: Config of {module.__name__} must inherit {name} of {home}")
    if group == "strategy":
        known = registry.COMMON_KEYS | set(module.Config.__dataclass_fields__)
        values = {key: value for key, value in values.items() if key in known}
    ignored = registry.COMMON_KEYS
    if group == "model" and "buffers" not in module.Config.__dataclass_fields__:
        convert(Buffers, values.get("buffers", "average"), "model.buffers")
        ignored |= {"buffers"}
    config = build(module.Config, values, group, ignore=ignored)
    return Choice(str(values.get("name")), module, config, dict(values))


@dataclass(frozen=True)
class NodeRun:
    """What a node needs to know of a run; the rest stays on the server."""

    seed: int
    num_nodes: int
    strategy: Choice  # the node half
    dataset: Choice
    partition: Choice
    model: Choice
    flipped: tuple[int, ...] = ()  # in simulation: nodes that train on wrong labels
    images: Mapping[str, Any] | None = None  # on devices: what their data must be like (contrafed.data.own.facts_of)
    privacy: Choice | None = None  # where nodes themselves add noise

    def to_json(self) -> str:
        """Return the run as JSON, the same text for the same run."""
        names = NODE_GROUPS if self.privacy is None else (*NODE_GROUPS, "privacy")
        groups = {name: dict(getattr(self, name).values) for name in names}
        others = {name: getattr(self, name) for name in ("seed", "num_nodes", "flipped", "images")}
        return json.dumps({**others, **groups}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "NodeRun":
        """Return the run that ``to_json`` described. Raises ``UserError`` where this machine lacks what it needs."""
        return node_run(json.loads(text))


NODE_GROUPS = ("strategy", "dataset", "partition", "model")


def node_run(values: Mapping[str, Any]) -> NodeRun:
    """Return the node's part of a composed configuration. Raises ``UserError`` for a wrong name, key, type or value.

    What the ``strategy`` group holds for the server half is left out.
    """
    chosen: dict[str, Any] = {name: choose(name, values[name]) for name in NODE_GROUPS}
    privacy = choose("privacy", values["privacy"]) if "privacy" in values else None
    if privacy is None or not isinstance(privacy.config, local.Config | laplace.Config):
        privacy = None
    flipped, images = tuple(values.get("flipped", ())), values.get("images")
    return NodeRun(values["seed"], values["num_nodes"], **chosen, flipped=flipped, images=images, privacy=privacy)
