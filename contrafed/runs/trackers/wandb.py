"""wandb: Weights & Biases, offline by default."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from contrafed.core.tracker import Tracked, Tracker

# In the run's folder: the id by which a resumed run is found again.
NAME_FILE = "wandb.id"


@dataclass(frozen=True)
class Config:
    """Settings of the tracker."""

    project: str
    entity: str | None
    mode: Literal["offline", "online"]


class WandB(Tracker):
    """A run of a project. Offline it is in the run's folder ``wandb/`` until it is uploaded."""

    package = "wandb"

    def __init__(self, config: Config, run: Tracked) -> None:
        """Start the run. Online this needs ``wandb login``, and never asks in the terminal."""
        import wandb

        name = run.folder / NAME_FILE
        earlier = name.read_text(encoding="utf-8") if run.resumed and name.exists() else None
        self.config = config
        self.run: Any = wandb.init(
            project=config.project,
            entity=config.entity,
            name=run.folder.name,
            dir=str(run.folder),
            mode=config.mode,
            config=dict(run.composed),
            id=earlier,
            resume="allow" if earlier else None,
            settings=wandb.Settings(silent=True, console="off", disable_git=True, login_timeout=1),
        )
        name.write_text(self.run.id, encoding="utf-8")

    @property
    def line(self) -> str:
        """The command that uploads an offline run, or an online run's address."""
        if self.config.mode == "online":
            return str(self.run.url)
        return f"wandb sync {shlex.quote(self.run.dir.removesuffix('/files'))}"

    def log(self, server_round: int, values: Mapping[str, float]) -> None:
        """Log a round as the step of its number."""
        self.run.log(dict(values), step=server_round)

    def close(self, status: str) -> None:
        """Finish the run."""
        self.run.finish(exit_code=0 if status == "finished" else 1)
