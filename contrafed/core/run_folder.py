"""Read what a run wrote to its folder, to resume it or to report it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from contrafed.core.errors import UserError

# No run writes a configuration or a summary as long as this, nor a log.
MAX_TEXT_BYTES, MAX_LOG_BYTES = 1 << 24, 1 << 32
ALIAS = re.compile(r"(^|[\s,\[:-])\*\w", re.MULTILINE)


def check_regular(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> Path:
    """Return the path of a file that can be read without harm. Raises ``UserError`` for a pipe, a device or a huge file."""
    if path.exists() and not path.is_file():
        raise UserError(f"cannot read {path}: it is no regular file")
    if path.exists() and path.stat().st_size > max_bytes:
        raise UserError(f"cannot read {path}: it has {path.stat().st_size} bytes, and at most {max_bytes} are read")
    return path


def _read_yaml(path: Path) -> Any:
    """Return what a YAML holds. Raises ``ValueError`` for aliases: a few lines of them can stand for billions of values."""
    text = check_regular(path).read_text(encoding="utf-8")
    if ALIAS.search(text) and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
        raise ValueError("aliases")
    return OmegaConf.to_container(OmegaConf.create(text))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration in a run's folder.

    Raises:
        UserError: If it cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    try:
        stored = _read_yaml(folder / "config.yaml")
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise UserError(f"cannot read {folder / 'config.yaml'} ({type(error).__name__})") from error
    if not isinstance(stored, dict):
        raise UserError(f"{folder / 'config.yaml'} is no run's configuration")
    if "num_nodes" in stored:
        raise UserError(f"{folder}: a run of an older Contrafed, whose keys had other names. Fix: name another folder")
    return add_later_keys({str(key): value for key, value in stored.items()})


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary in a run's folder, None if there is none or it cannot be read."""
    try:
        summary = json.loads(check_regular(folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, UserError, ValueError, RecursionError):
        return None
    return summary if isinstance(summary, dict) else None


def add_later_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration with the keys that runs of before did not have: no clock, and no late clients."""
    found = {"clock": {"name": "none"}, "schedule": {"name": "synchronous"}, **config}
    if isinstance(participation := found.get("participation"), Mapping):
        found["participation"] = {"deadline": None, "over_select": None, "late": "drop", "staleness_a": 0.0, **participation}
    return found
