"""Hold a run's choices as typed objects: for each group a module and its checked settings, and the part that a client needs.

``ClientRun`` is sent to workers and devices as JSON. There ``client_run_of`` rebuilds it, as it built it on the server.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Annotated, Any, Literal

from contrafed.core import registry
from contrafed.core.errors import UserError
from contrafed.core.privacy import laplace, local
from contrafed.core.schema import Range, build


@dataclass(frozen=True)
class Choice:
    """A choice in a group of the configuration."""

    name: str
    module: ModuleType  # its code
    config: Any  # the module's ``Config``, checked
    values: Mapping[str, Any]  # the composed values behind ``config``, with ``name`` and ``module``

    @property
    def is_own(self) -> bool:
        """Whether its code is not the project's."""
        return not self.module.__name__.startswith("contrafed.")


# A model's buffers are averaged as parameters are, stay on their client, or keep their initial values.
Buffers = Literal["average", "local", "frozen"]


@dataclass(frozen=True)
class ModelSettings:
    """Settings of every model, in addition to its own. Their defaults hold for a model without the keys of conf/config.yaml."""

    buffers: Buffers = "average"
    image_size: Annotated[int, Range(ge=8)] | None = None
    pretrained: str | None = None
    freeze: tuple[str, ...] = ()


def model_settings(values: Mapping[str, Any]) -> ModelSettings:
    """Return the settings of every model among a model's composed ``values``. Raises ``UserError``."""
    known = {each.name: values.get(each.name, each.default) for each in fields(ModelSettings)}
    return build(ModelSettings, known, "model")


# Packages of the code behind each group's choices. For ``strategy`` it is the client.
PACKAGES = {
    "strategy": "contrafed.clients",
    "dataset": "contrafed.partitions.datasets",
    "partition": "contrafed.partitions.partitioners",
    "participation": "contrafed.partitions.participation",
    "clock": "contrafed.partitions.clocks",
    "schedule": "contrafed.server.schedule",
    "model": "contrafed.models",
    "engine": "contrafed.engines",
    "privacy": "contrafed.core.privacy",
    "tracker": "contrafed.runs.trackers",
    "attack": "contrafed.strategies.attacks",
    "aggregation": "contrafed.strategies.aggregation",
}

# Functions that the code behind a choice must define, with their parameters. The first one is required if it has none of them.
FUNCTIONS = {
    "dataset": {"load": "config, name"},
    "partition": {
        "split": "config, draw",
        "explicit": "config, test, num_clients",
        "lazy": "config, y, pool, num_classes, num_clients, seed",
    },
    "model": {"build": "config, in_channels, image_size, num_classes"},
}
# Classes that its ``Config`` must inherit. They hold the settings that Contrafed itself reads.
INHERITED_KEYS = {
    "dataset": ("contrafed.data.images", "Common"),
    "partition": ("contrafed.data.partition", "Common"),
    "participation": ("contrafed.data.participation", "Selection"),
}


def choose(group: str, values: Mapping[str, Any], module: ModuleType | None = None) -> Choice:
    """Return the choice that a group's composed YAML describes.

    The group ``strategy`` holds the settings of a method's client and of its strategy. Each takes its own settings only.

    Args:
        group: Name of the group.
        values: The composed YAML.
        module: The code, if ``values`` do not name it. For a strategy ``values`` name the client.

    Raises:
        UserError: For a wrong name, key, type or value, or if the code lacks what its group requires.
    """
    module = module or registry.find(PACKAGES[group], group, values)
    choice = f"{group}={values.get('name')}"
    if group in FUNCTIONS:
        registry.check_functions(module, choice, FUNCTIONS[group])
    if group in INHERITED_KEYS:
        home, name = INHERITED_KEYS[group]
        if not issubclass(module.Config, getattr(importlib.import_module(home), name)):
            raise UserError(f"{choice}: Config of {module.__name__} must inherit {name} of {home}")
    if group == "strategy":
        known = registry.COMMON_KEYS | set(module.Config.__dataclass_fields__)
        values = {key: value for key, value in values.items() if key in known}
    ignored = registry.COMMON_KEYS
    if group == "model":
        model_settings(values)
        ignored |= {each.name for each in fields(ModelSettings)} - set(module.Config.__dataclass_fields__)
    config = build(module.Config, values, group, ignore=ignored)
    return Choice(str(values.get("name")), module, config, dict(values))


@dataclass(frozen=True)
class ClientRun:
    """The part of a run's configuration that a client needs. The other settings stay on the server."""

    seed: int
    num_clients: int
    strategy: Choice  # the client
    dataset: Choice
    partition: Choice
    model: Choice
    flipped: tuple[int, ...] = ()  # in simulation: clients that train on wrong labels
    images: Mapping[str, Any] | None = None  # on devices: the required shape of their data (contrafed.data.own.facts_of)
    privacy: Choice | None = None  # if the clients add the noise
    federation_seed: int | None = None  # of the partition; None: ``seed``

    @property
    def seed_of_federation(self) -> int:
        """The seed of the partition."""
        return self.seed if self.federation_seed is None else self.federation_seed

    def to_json(self) -> str:
        """Return the run as JSON, the same text for the same run."""
        names = CLIENT_GROUPS if self.privacy is None else (*CLIENT_GROUPS, "privacy")
        groups = {name: dict(getattr(self, name).values) for name in names}
        others = {name: getattr(self, name) for name in ("seed", "num_clients", "flipped", "images")}
        if self.federation_seed is not None:
            others["federation_seed"] = self.federation_seed
        return json.dumps({**others, **groups}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "ClientRun":
        """Return the run that ``to_json`` described.

        Raises:
            UserError: If this machine lacks something that the run needs.
        """
        return client_run_of(json.loads(text))


CLIENT_GROUPS = ("strategy", "dataset", "partition", "model")


def client_run_of(values: Mapping[str, Any]) -> ClientRun:
    """Return the client's part of a composed configuration.

    Settings of the server's strategy are left out.

    Raises:
        UserError: For a wrong name, key, type or value.
    """
    chosen: dict[str, Any] = {name: choose(name, values[name]) for name in CLIENT_GROUPS}
    privacy = choose("privacy", values["privacy"]) if "privacy" in values else None
    if privacy is None or not isinstance(privacy.config, local.Config | laplace.Config):
        privacy = None
    flipped, images = tuple(values.get("flipped", ())), values.get("images")
    more: dict[str, Any] = {
        "flipped": flipped,
        "images": images,
        "privacy": privacy,
        "federation_seed": values.get("federation_seed"),
    }
    return ClientRun(values["seed"], values["num_clients"], **chosen, **more)
