"""Define the base class of clocks: how long clients compute and communicate, in simulated seconds."""

import inspect
from typing import Any, NamedTuple

import numpy as np

from contrafed.core import registry
from contrafed.core.client_run import Choice
from contrafed.core.errors import UserError


class Speeds(NamedTuple):
    """The speeds of m clients in a round."""

    step: np.ndarray  # (m,) seconds of a local step
    down: np.ndarray  # (m,) bytes per second to the client
    up: np.ndarray  # (m,) bytes per second from the client


class Clock:
    """Tells how long each of K clients takes. Every draw is a function of (seed, purpose, round, client)."""

    def __init__(self, config: Any, num_clients: int, seed: int) -> None:
        """Initialise the clock.

        Args:
            config: Settings of the clock.
            num_clients: K, of the clients that may train.
            seed: Of the federation.
        """
        self.config, self.num_clients, self.seed = config, num_clients, seed
        self.prepare()

    def prepare(self) -> None:
        """Draw or read what stays fixed for the whole run."""

    def speeds(self, clients: np.ndarray, server_round: int) -> Speeds:
        """Return the speeds of ``clients`` (m,) in a 1-based round, all above 0."""
        raise NotImplementedError

    def seconds(self, clients: np.ndarray, server_round: int, steps: np.ndarray, bytes_down: int, bytes_up: int) -> np.ndarray:
        """Return the seconds from the broadcast to the reply of each client (m,): download, local steps, upload.

        Args:
            clients: Partition ids (m,).
            server_round: The 1-based round of their start.
            steps: Each client's local steps (m,).
            bytes_down: Bytes that each of them receives.
            bytes_up: Bytes that each of them uploads.

        Raises:
            UserError: If a client takes more seconds than a number can hold.
        """
        speeds = self.speeds(clients, server_round)
        with np.errstate(over="ignore"):
            found: np.ndarray = bytes_down / speeds.down + steps * speeds.step + bytes_up / speeds.up
        if len(endless := clients[~np.isfinite(found)]):
            raise UserError(f"clock: client {endless[0]} would never reply in round {server_round}. Fix: a larger bandwidth")
        return found

    def steps_within(
        self, seconds: float, clients: np.ndarray, server_round: int, bytes_down: int, bytes_up: int
    ) -> np.ndarray:
        """Return how many local steps fit into ``seconds`` between download and upload, for each client (m,), int64."""
        speeds = self.speeds(clients, server_round)
        left = seconds - bytes_down / speeds.down - bytes_up / speeds.up
        # Rounded, because 0.3 / 0.1 is below 3.
        return np.floor(np.round(np.maximum(left, 0) / speeds.step, 9)).astype(np.int64)


def make_clock(choice: Choice, num_clients: int, seed: int) -> Clock | None:
    """Return the chosen clock, None for ``clock=none``. Raises ``UserError`` for wrong settings or a wrong class."""
    if choice.name == "none":
        return None
    return registry.only_subclass(choice.module, Clock)(choice.config, num_clients, seed)


def check_clock(choice: Choice, num_clients: int, seed: int) -> None:
    """Raise ``UserError`` for a clock whose speeds have another shape than its clients, or are not above 0.

    It is also raised, with the line, if the author's code fails. The first and the last client are tried.
    """
    if choice.name == "none":
        return
    found, clients = registry.only_subclass(choice.module, Clock), np.unique([0, num_clients - 1])
    wanted = f"clock={choice.name}: {found.__name__}.speeds must return Speeds of ({len(clients)},) numbers above 0"
    with registry.report_author_errors(f"clock={choice.name}", inspect.getfile(found)):
        clock = make_clock(choice, num_clients, seed)
        assert clock is not None
        speeds = clock.speeds(clients, 1)
    for name, values in zip(Speeds._fields, speeds, strict=False):
        if not isinstance(values, np.ndarray) or values.shape != clients.shape or values.dtype.kind not in "iuf":
            raise UserError(f"{wanted}, got {name} {type(values).__name__} {np.shape(values)}")
        if not (np.isfinite(values) & (values > 0)).all():
            raise UserError(f"{wanted}, got {name} {values.min():g}")
