"""wandb: Weights & Biases, offline unless asked otherwise."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from contrafed.core.tracker import Tracked, Tracker

# In the run's folder: by which a run that goes on finds itself again.
NAME_FILE = "wandb.id"


@dataclass(frozen=True)
class Config:
    """Settings of the tracker."""

    project: str
    entity: str | None
    mode: Literal["offline", "online"]


class WandB(Tracker):
    """A run of a project; offline it lies in the folder ``wandb/`` of the run until it is sent."""

    package = "wandb"

    def __init__(self, config: Config, run: Tracked) -> None:
        """Online this needs ``wandb login``, and asks nobody on a terminal."""
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
        """The command that sends an offline run, or where it is."""
        if self.config.mode == "online":
            return str(self.run.url)
        return f"wandb sync {shlex.quote(self.run.dir.removesuffix('/files'))}"

    def log(self, server_round: int, values: Mapping[str, float]) -> None:
        """Log a round as the step of its number."""
        self.run.log(dict(values), step=server_round)

    def close(self, status: str) -> None:
        """Finish the run."""
        self.run.finish(exit_code=0 if status == "finished" else 1)
