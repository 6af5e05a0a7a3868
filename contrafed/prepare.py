"""From overrides to what a ServerApp takes: the checked configuration, its run's folder, and where a run goes on from."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from contrafed import checkpoint
from contrafed.cli import compose_job
from contrafed.reporting import claim_folder, quiet_libraries
from contrafed.settings import check, for_evaluation, read_config
from core.errors import UserError

LATEST = "latest"


def checked(cfg: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that is to run, as plain containers, with libraries quiet. Raises ``UserError``."""
    config: Any = OmegaConf.to_container(cfg, resolve=True) if isinstance(cfg, DictConfig) else dict(cfg)
    quiet_libraries(bool(config.get("verbose", False)))
    config = for_evaluation(config)
    check(config)
    return config  # type: ignore[no-any-return]


def with_folder(config: Mapping[str, Any], unique: bool) -> dict[str, Any]:
    """Return the configuration as the ServerApp takes it: with its run's folder, made here, and with itself as text."""
    text = OmegaConf.to_yaml(OmegaConf.create(dict(config)))
    start = starting_point(config)
    folder = Path(config["output_dir"])
    if config["resume"] != LATEST or not (folder / "config.yaml").exists():
        folder = claim_folder(folder, unique=unique)
    return {**config, "resume": start, "folder": str(folder), "text": text}


def deployed(overrides: str) -> dict[str, Any]:
    """Return the configuration of a run on real devices from one string of Hydra overrides. Raises ``UserError``."""
    config = checked(compose_job(shlex.split(overrides)))
    if config["checkpoint_every"] is not None or config["resume"] is not None:
        raise UserError("checkpoint_every and resume go with simulation: devices keep what they remember to themselves")
    return with_folder(config, unique=True)


def starting_point(config: Mapping[str, Any]) -> str | None:
    """Return the path of the checkpoint that ``resume`` means, None to begin. Raises ``UserError`` where it does not fit."""
    if config["resume"] is None:
        return None
    latest = config["resume"] == LATEST
    found = checkpoint.find(config["output_dir"] if latest else config["resume"])
    if found is not None:
        checkpoint.check_same(found.path, found.config, config)
        checkpoint.check_logs(found)
        return str(found.path)
    if not latest:
        raise UserError(f"resume: there is no whole checkpoint in {config['resume']}")
    folder = Path(config["output_dir"])
    if (folder / "config.yaml").exists():  # a run that stopped before its first checkpoint is begun anew, no other
        if (folder / "summary.json").exists() and '"finished"' in (folder / "summary.json").read_text(encoding="utf-8"):
            raise UserError(f"resume: {folder} holds a finished run without checkpoints; name another output_dir")
        checkpoint.check_same(folder, read_config(folder), config)
    print(f"no checkpoint in {folder}: beginning with round 1", flush=True)
    return None
