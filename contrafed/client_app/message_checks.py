"""Check a server's messages on a device: names of runs must be numbers, and files must be in the client's own folders."""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contrafed.client_app.files import Moment
from contrafed.core.client_run import PACKAGES
from contrafed.core.errors import UserError
from contrafed.data.images import GENERATED_PATH

# Flower's run ids have 64 bits.
RUN_ID_PATTERN = re.compile(r"[0-9]{1,20}")
CHECKPOINT_PATTERN = re.compile(r"([0-9]{1,20})@([0-9]{1,9})")
# Keys of the server's settings that name files: initial weights, a data set's, and a partition's lists.
WEIGHTS = ("model", "pretrained")
DATA = (("dataset", "root"), ("dataset", "path"), ("partition", "root"), ("partition", "path"))
# Networks that a server may name without the device owner's consent.
NETWORKS = ("torch.nn", "torchvision.models")
# Their arguments that download weights.
DOWNLOADS = ("weights", "pretrained")
# OWNER/NAME of the hub, and never a folder. A name without owner may stand for code that reads the working folder.
REPOSITORY_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Folder of data sets on a device without data-dir in its --node-config.
DATA_DIR = "~/.cache/contrafed"


def run_name(value: Any) -> str:
    """Return the id of a run from a server's message, which names files. Raises ``UserError`` for anything but digits."""
    if not isinstance(value, str) or not RUN_ID_PATTERN.fullmatch(value):
        raise UserError(f"a run is known by its number of at most 20 digits, got {str(value)[:40]!r}")
    return value


def moment_of(config: Mapping[str, Any], sitting: str) -> tuple[str, Moment]:
    """Return the run's name in files and where it stands, from a message of a device's server. Flower's run id is the default.

    Raises:
        UserError: For values that no Contrafed server sends.
    """
    past: dict[str, int] = {}
    left: Any = config.get("past", [])
    for item in left if isinstance(left, list) else [left]:
        found = CHECKPOINT_PATTERN.fullmatch(item) if isinstance(item, str) else None
        if found is None:
            raise UserError(f"what a run went on from is RUN@ROUND, got {str(item)[:40]!r}")
        past[found[1]] = int(found[2])
    server_round, known = _count(config, "server-round"), _count(config, "known")
    checkpoint = _count(config, "checkpoint") if "checkpoint" in config else None
    return run_name(config.get("run", sitting)), Moment(sitting, server_round, past, checkpoint, known)


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UserError(f"{key} is a whole number from 0, got {str(value)[:40]!r}")
    return value


def check_paths(settings: str, data_dir: str, own_data: bool = False) -> None:
    """Raise ``UserError`` if the server's settings name files outside ``data_dir``, the client's own choice, or weights to
    download.

    A client with ``own_data`` opens no data sets and lists, so their paths do not matter.
    """
    allowed, groups = Path(data_dir).expanduser().resolve(), json.loads(settings)
    repository = None if own_data else groups["dataset"].get("repository")
    if repository is not None and (not REPOSITORY_PATTERN.fullmatch(str(repository)) or Path(str(repository)).exists()):
        raise UserError(f"dataset.repository={str(repository)[:100]!r} names no data set of the hub. Fix: OWNER/NAME")
    _check_downloads(groups["model"])
    for group, key in (WEIGHTS, *(() if own_data else DATA)):
        value = groups[group].get(key)
        if value is None or (group, key, value) == ("dataset", "path", GENERATED_PATH):
            continue
        try:
            inside = Path(str(value)).expanduser().resolve().is_relative_to(allowed)
        except (OSError, ValueError, RuntimeError):  # too long, with a NUL, or of an unknown user
            inside = False
        if not inside:
            raise UserError(
                f"{group}.{key}={str(value)[:100]!r} is not below {allowed}, where this client has the files that a server "
                "names. Fix: its --node-config data-dir may name another folder"
            )


def _check_downloads(model: Mapping[str, Any]) -> None:
    """Raise ``UserError`` if torchvision would download weights for the network that the settings name, also by default."""
    module, _, name = str(model.get("target")).rpartition(".")
    if not f"{module}.".startswith("torchvision.models."):
        return
    try:
        make = getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError):  # the network's own check reports it
        return
    if getattr(make, "__name__", "") == "get_model":  # it builds any network, with that network's defaults
        raise UserError("model.target: this device does not call get_model. Fix: name the network itself")
    own = inspect.signature(make).parameters if callable(make) else {}
    wanted = {each: parameter.default for each, parameter in own.items() if parameter.default is not parameter.empty}
    wanted |= model.get("args") or {}
    if found := [each for each, value in wanted.items() if each.startswith(DOWNLOADS) and value not in (None, False)]:
        raise UserError(
            f"model.args.{found[0][:100]}: this device downloads no weights for a server. Fix: set it to null, and use "
            "model.pretrained=FILE"
        )


def check_modules(settings: str, modules: str) -> None:
    """Raise ``UserError`` where the settings name Python modules that are neither Contrafed's choices nor of this device's.

    In a checkout ``contrafed.X`` is also any other file next to the package. A server must not have these imported.

    ``modules``: names with commas between them, from --node-config. Each stands for the modules below it too.
    """
    allowed = (*PACKAGES.values(), *filter(None, (name.strip() for name in modules.split(","))))
    for group, values in json.loads(settings).items():
        if not isinstance(values, dict):
            continue
        for key in ("module", "name", "target"):
            module, names = str(values.get(key) or ""), (*allowed, *(NETWORKS if key == "target" else ()))
            if "." in module and not any(module == name or module.startswith(f"{name}.") for name in names):
                raise UserError(
                    f"{group}: this device does not import {module[:100]}. Fix: its owner names it in --node-config modules"
                )


def check_steps(steps: int, limit: Any) -> None:
    """Raise ``UserError`` if a server asks for more local steps than the ``limit`` of --node-config, None for any number."""
    if limit is None:
        return
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise UserError(f"--node-config max-local-steps must be a whole number from 1, got {limit!r}")
    if steps > limit:
        raise UserError(f"max-local-steps={limit} of this device's --node-config: the server asks for {steps} local steps")


def in_simulation() -> bool:
    """Return whether this process is a worker of Flower's simulation, which has the server's disk. A device never imports
    Ray.
    """
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
