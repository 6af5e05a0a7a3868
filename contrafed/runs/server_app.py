"""Define the ServerApp: one run of a method on a given Grid. ``serve`` is the same in every engine."""

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from contrafed.config.run_config import Run
from contrafed.core.disk import told_in_one_line
from contrafed.core.errors import RunStopped, UserError
from contrafed.engines.device_grid import DeviceGrid
from contrafed.engines.flower import FlowerGrid
from contrafed.engines.grid import RunGrid
from contrafed.runs import checkpoint
from contrafed.runs.output import alone, print_summary
from contrafed.runs.session import OnRound, Session

# Seconds between two counts of a simulation's clients.
POLL_SECONDS = 1.0

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what ``flwr run`` passes in ``run_config["overrides"]``: Hydra overrides in one string.

    ``run_config["config-dir"]`` is the user's folder of YAMLs on this machine, empty for none.
    """
    from flwr.superlink.grid import InMemoryGrid

    from contrafed.runs.setup import compose_deployed_run

    mistakes_in_one_line()
    overrides, config_dir = str(context.run_config["overrides"]), str(context.run_config.get("config-dir", ""))
    if isinstance(grid, InMemoryGrid):  # a federation of Flower's simulation
        run = compose_deployed_run(overrides, count_clients(grid), config_dir)
        clients: RunGrid = FlowerGrid(grid, "flower-simulation", patience=run.wait_for_clients)
    else:
        run = compose_deployed_run(overrides, config_dir=config_dir)
        clients = DeviceGrid(grid, context.run_id, run.wait_for_clients)
    assert run.folder is not None
    with alone(run.folder), _finish_before_sigint():
        summary = serve(clients, run)
    print_summary(summary, str(run.folder.resolve()))


def app_for(run: Run, on_round: OnRound | None = None) -> ServerApp:
    """Return a ServerApp that serves ``run``, for an engine that makes the Grid itself."""
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, run, on_round)  # type: ignore[arg-type]

    return server_app


def serve(grid: RunGrid, run: Run, on_round: OnRound | None = None) -> dict[str, Any]:
    """Train for ``num_rounds`` rounds, complete the run's folder, and return its summary.

    Ctrl-C (``KeyboardInterrupt``) ends the run after everything is written, and is raised again. A failing disk raises
    ``DiskError``.
    """
    assert run.folder is not None
    folder = run.folder
    with told_in_one_line(folder, lambda: what_is_left(folder)):
        session = Session(grid, run, on_round)
        try:
            session.train()
        except (KeyboardInterrupt, SystemExit):  # SystemExit comes from flwr stop
            try:
                session.finish("interrupted")
            except Exception as error:  # a sweep ends anyway
                print(f"error: {folder} is not complete: {error}", file=sys.stderr)
            raise
        except BaseException as error:
            status = error.status if isinstance(error, RunStopped) else "failed"
            with _ignore_sigint() if status == "interrupted" else contextlib.nullcontext():
                session.finish(status)
            raise
        return session.finish("finished")


@contextlib.contextmanager
def _finish_before_sigint() -> Iterator[None]:
    """Let a run that Flower ends be written first. Flower's own handler of SIGINT kills the process after five seconds."""
    try:
        with _sigint_handled_by(signal.default_int_handler):
            yield
    except KeyboardInterrupt:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        raise


@contextlib.contextmanager
def _ignore_sigint() -> Iterator[None]:
    """Ignore SIGINT. When a SuperLink has ended a run, Flower raises it in another thread of the run's own process."""
    with _sigint_handled_by(signal.SIG_IGN):
        yield


@contextlib.contextmanager
def _sigint_handled_by(handler: Any) -> Iterator[None]:
    """Use another handler of SIGINT in the block. Only the main thread may do so, so nothing changes in others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def what_is_left(folder: Path) -> str:
    """Return how to resume a run whose disk failed."""
    found = checkpoint.find(folder)
    if found is None:
        return "there is no checkpoint"
    return f"resume=latest continues from round {found.server_round} when the disk can be written"


def count_clients(grid: Grid) -> int:
    """Return the number of clients of Flower's simulation, which registers them while the ServerApp starts."""
    count = -1
    while count < 1 or count != len(list(grid.get_node_ids())):
        count = len(list(grid.get_node_ids()))
        time.sleep(POLL_SECONDS)
    return count


def mistakes_in_one_line() -> None:
    """Make Flower report a user's mistake or a full disk without a traceback, because the line itself says what to do."""

    def shorten(record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], UserError | RunStopped):
            record.msg, record.args, record.exc_info = "%s", (f"error: {record.exc_info[1]}",), None
        return True

    logging.getLogger("flwr").addFilter(shorten)
