"""tensorboard: event files in the run's folder."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contrafed.core.tracker import Tracked, Tracker

# Seconds after which events are on the disk. TensorBoard's own thread writes them.
FLUSH_SECONDS = 10


@dataclass(frozen=True)
class Config:
    """Settings of the tracker: none."""


class TensorBoard(Tracker):
    """Writes ``tensorboard/``. A resumed run hides what an earlier attempt wrote for the same rounds."""

    def __init__(self, config: Config, run: Tracked) -> None:
        self.folder = run.folder / "tensorboard"
        self.writer: Any = None

    @property
    def line(self) -> str:
        """The command that shows it."""
        return f"tensorboard --logdir {shlex.quote(str(self.folder))}"

    def log(self, server_round: int, values: Mapping[str, float]) -> None:
        """Write a round's events."""
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.folder), flush_secs=FLUSH_SECONDS, purge_step=server_round)
        for name, value in values.items():
            self.writer.add_scalar(name, value, server_round)

    def close(self, status: str) -> None:
        """Write the remaining events."""
        if self.writer is not None:
            self.writer.close()
