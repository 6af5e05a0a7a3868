"""engine=flower: Flower's own simulation runtime, unmodified. It shows that nothing depends on Contrafed's Grids."""

import contextlib
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any

import torch
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from contrafed.client_app.app import app
from contrafed.core.client_run import ClientRun
from contrafed.core.errors import UserError
from contrafed.core.schema import Range
from contrafed.data.federation import Federation
from contrafed.engines.client_registry import Members, Registry
from contrafed.engines.deadlines import MAX_REPLY_SECONDS, late_reply
from contrafed.engines.engine_run import EngineRun
from contrafed.engines.grid import SimulatedGrid
from contrafed.training.workspace import Workspace, default_device, install, uninstall

# Seconds between two queries of the runtime's inbox.
POLL_SECONDS = 0.05
# Seconds that an interrupted run has to write its files.
WRITE_SECONDS = 60.0


@dataclass(frozen=True)
class Config:
    """Settings of the engine."""

    cpus_per_client: Annotated[float, Range(gt=0)]
    gpus_per_client: Annotated[float, Range(ge=0, le=1)]  # more than 1 would be idle
    round_timeout: Annotated[float, Range(gt=0)] | None  # not supported here
    max_norm: Annotated[float, Range(gt=0)] | None  # larger joint L2 norms of a reply's tensors are rejected
    max_norm_ratio: Annotated[float, Range(gt=1)] | None  # also those so many times the median of recent accepted ones

    def __post_init__(self) -> None:
        """Raise ``UserError`` for a time limit."""
        refuse_timeout(self.round_timeout)


def refuse_timeout(seconds: float | None) -> None:
    """Raise ``UserError`` for a time limit, because Flower's simulation finishes late work before the next round."""
    if seconds is not None:
        raise UserError("engine.round_timeout is for engine=ray, engine=local and devices: Flower's simulation drops nothing")


class FlowerGrid(SimulatedGrid):
    """Wraps the Grid of Flower's simulation runtime. Waiting ends with ``KeyboardInterrupt`` when ``stop`` is set.

    The runtime calls a ServerApp in a thread, which receives no Ctrl-C.
    """

    def __init__(
        self, grid: Grid, engine: str = "flower", *, stop: threading.Event | None = None, patience: float | None = None
    ) -> None:
        """Wrap ``grid``. ``engine`` is the summary's entry, and ``patience`` the seconds to wait for the clients."""
        self.grid, self.engine, self.patience = grid, engine, patience
        self.stop = stop or threading.Event()

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected clients."""
        self._check()
        return self.grid.get_node_ids()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for their replies, up to ``timeout`` seconds.

        Without ``timeout`` a reply fails if it is missing after ``MAX_REPLY_SECONDS``.
        """
        waiting, _ = self.send(messages)
        replies = self.receive(waiting, time.monotonic() + (MAX_REPLY_SECONDS if timeout is None else timeout))
        if timeout is None:
            replies += map(late_reply, waiting.values())
        return replies

    def send(self, messages: Iterable[Message], timeout: float = 0.0) -> tuple[dict[str, Message], list[Message]]:
        """Send messages, and return those that Flower took, by id. There is no ``timeout``, because nothing is dropped here."""
        messages = list(messages)
        pushed = set(self.grid.push_messages(messages))
        return {message.metadata.message_id: message for message in messages if message.metadata.message_id in pushed}, []

    def receive(self, waiting: dict[str, Message], ends: float) -> list[Message]:
        """Wait for the replies to ``waiting`` messages, until ``ends`` of ``time.monotonic``. Remove those that have one."""
        replies = list[Message]()
        while waiting and time.monotonic() < ends:
            self._check()
            found = list(self.grid.pull_messages(waiting))
            replies += found
            for reply in found:
                waiting.pop(reply.metadata.reply_to_message_id, None)
            if waiting:
                time.sleep(POLL_SECONDS)
        return replies

    def members(self, run: ClientRun, federation: Federation, places: Mapping[str, str]) -> Members:
        """Ask every client for its partition."""
        return Registry(self, federation, run.to_json(), places, self.patience).wait()

    def memory_cost(self) -> None:
        """Return nothing, because Flower does not report it."""

    def take_changed(self) -> dict[int, dict[str, Tensor]]:
        """Raise ``UserError``, because Flower does not give access to client state."""
        raise UserError("Flower's simulation keeps client state to itself; checkpoints need engine=ray or engine=local")

    def restore(self, client_states: Iterable[tuple[int, dict[str, Tensor]]], *, changed: bool) -> None:
        """Raise ``UserError`` like ``take_changed``."""
        self.take_changed()

    def _check(self) -> None:
        if self.stop.is_set():
            raise KeyboardInterrupt


def run(config: Config, engine_run: EngineRun) -> None:
    """Run in Flower's simulation runtime, one CPU per ClientApp by default."""
    from flwr.simulation import run_simulation

    from contrafed.engines.ray_start import start_ray, stop_ray

    stop_ray()  # it may have joined a cluster
    start_ray(
        None, engine_run.verbose, None, None
    )  # otherwise Flower starts it, and SIGTERM would abort the process without writing
    _check_resources(config)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    device = default_device() if config.gpus_per_client else "cpu"  # the clients' device
    install(
        engine_run.client.to_json(),
        Workspace(engine_run.client, device=device, federation=engine_run.federation, model=engine_run.model),
    )
    stop, done = threading.Event(), threading.Event()
    try:
        with warnings.catch_warnings(), _stopped_by_signals(stop, engine_run.verbose):
            warnings.simplefilter("ignore", DeprecationWarning)
            run_simulation(
                server_app=_in_thread(engine_run, stop, done),
                client_app=app,
                num_supernodes=engine_run.num_clients,
                backend_config={"client_resources": {"num_cpus": config.cpus_per_client, "num_gpus": config.gpus_per_client}},
                verbose_logging=engine_run.verbose,
            )
    except BaseException:  # the ServerApp's thread would wait for ever
        stop.set()
        done.wait(WRITE_SECONDS)
        raise
    finally:
        uninstall()
        torch.set_num_threads(threads)


def _check_resources(config: Config) -> None:
    """Raise ``UserError`` if there is no room for a single client, because Flower would wait for ever."""
    import ray

    from contrafed.engines.ray import room

    there, share = ray.cluster_resources(), config.gpus_per_client
    for key, name in (("cpus_per_client", "CPU"), ("gpus_per_client", "GPU")):
        wanted, found = getattr(config, key), there.get(name, 0)
        if wanted > found:
            raise UserError(f"engine.{key}={wanted:g} is more than the {found:g} {name}s that Ray has")
    gpus, cpus = int(there.get("GPU", 0)), int(there.get("CPU", 0) / config.cpus_per_client)
    if share and min(cpus, int(gpus / share)) > room(gpus, share):
        raise UserError(
            f"engine.gpus_per_client={share:g}: {gpus} GPUs have no room for as many as Flower counts; take 1, 1/2, 1/3, ..."
        )


@contextlib.contextmanager
def _stopped_by_signals(stop: threading.Event, verbose: bool) -> Iterator[None]:
    """Set ``stop`` on Ctrl-C or SIGTERM, and raise ``KeyboardInterrupt`` when Flower has ended by itself.

    If it were raised at once, Flower would shut down Ray under its own threads. A thread that still calls Ray then ends the
    process, and nothing is written. A second signal, or ``WRITE_SECONDS`` without an end, raises it at once. From the first
    signal on Flower's log is silent, because its threads complain about the workers that Ctrl-C ends too.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other thread receives signals
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        # A signal that is ignored, or that ends the process at once, stays so.
        before = {number: handler for number, handler in before.items() if callable(handler)}
    patience: threading.Timer | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal patience
        if not verbose:
            logging.getLogger("flwr").setLevel(logging.CRITICAL)
        if stop.is_set():
            before[number](number, frame)
        else:
            stop.set()
            patience = threading.Timer(WRITE_SECONDS, os.kill, [os.getpid(), number])
            patience.daemon = True
            patience.start()

    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    except Exception:
        if not stop.is_set():
            raise
    finally:
        if patience is not None:
            patience.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
    if stop.is_set():
        raise KeyboardInterrupt


def _in_thread(engine_run: EngineRun, stop: threading.Event, done: threading.Event) -> ServerApp:
    """Return a ServerApp that runs the run's own one with Flower's Grid until ``stop`` is set, and then sets ``done``."""
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            engine_run.server_app(FlowerGrid(grid, stop=stop), context)  # type: ignore[arg-type]
        except KeyboardInterrupt:
            pass  # the thread that received Ctrl-C raises it
        finally:
            done.set()

    return server_app
