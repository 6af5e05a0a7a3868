"""Notice that Ray itself ended, that a machine of a cluster is gone, or that a worker does not run any more.

Workers count heartbeats in Ray's key-value store.
"""

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from contrafed.core.errors import RunStopped, UserError

# Seconds between two heartbeats of a worker, and between two looks at the workers that the driver waits for.
BEAT_SECONDS = 5.0
# A worker without a heartbeat for so many seconds is replaced: it was stopped, or its machine is gone.
MAX_SILENT_SECONDS = 120.0
NAMESPACE = b"contrafed"
# Ray's processes without which nothing runs.
VITAL_PROCESSES = ("raylet", "gcs_server")


def start_heartbeats() -> None:
    """Count heartbeats of this worker in their own thread, with what is needed to end its process."""
    import ray
    from ray.experimental.internal_kv import _internal_kv_put

    context = ray.get_runtime_context()
    key, place = str(context.get_actor_id()), [context.get_node_id(), os.getpid()]

    def beat() -> None:
        for number in itertools.count():
            _internal_kv_put(key, json.dumps([*place, number]), namespace=NAMESPACE)
            time.sleep(BEAT_SECONDS)

    threading.Thread(target=beat, daemon=True).start()


class Heartbeats:
    """What the driver knows of its workers' heartbeats."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[bytes | None, float]] = {}  # by actor id: the last heartbeat, and when it was new

    def is_silent(self, worker: Any) -> bool:
        """Return whether a worker had no new heartbeat for ``MAX_SILENT_SECONDS``, over this and earlier calls."""
        key, now = worker._actor_id.hex(), time.monotonic()
        value = _read(key)
        before, since = self.seen.get(key, (None, now))
        if key not in self.seen or value != before:
            self.seen[key] = (value, now)
            return False
        return now - since >= MAX_SILENT_SECONDS

    def kill(self, worker: Any) -> None:
        """End a worker. One that is stopped must run for that."""
        import ray
        from ray.experimental.internal_kv import _internal_kv_del

        key = worker._actor_id.hex()
        value = _read(key)
        if value is not None:
            node, process, _ = json.loads(value)
            if node == ray.get_runtime_context().get_node_id():
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGCONT)
        ray.kill(worker)
        self.seen.pop(key, None)
        _internal_kv_del(key, namespace=NAMESPACE)


def _read(key: str) -> bytes | None:
    from ray.experimental.internal_kv import _internal_kv_get

    return _internal_kv_get(key, namespace=NAMESPACE)


def find_dead_processes() -> list[str]:
    """Return which of the Ray processes that started here ended, empty for a cluster's."""
    from ray._private import worker

    node = worker._global_node
    return [] if node is None else [name for name, _ in node.dead_processes() if name in VITAL_PROCESSES]


def find_machines() -> frozenset[str]:
    """Return the ids of the machines that Ray has now. A machine that comes back has another id."""
    import ray

    return frozenset(machine["NodeID"] for machine in ray.nodes() if machine["Alive"])


class StateLost(RunStopped):
    """A client state that a worker cannot read, because Ray has lost it. It is no fault of the client."""


@contextlib.contextmanager
def report_dead_ray(machines: frozenset[str] = frozenset()) -> Iterator[None]:
    """Raise ``RunStopped`` if Ray's own processes ended before the block, or if the block fails because Ray lost something.

    Args:
        machines: The ids of the machines that the run needs.
    """
    import ray

    check_ray()
    try:
        yield
    except Exception as error:
        if isinstance(error, RunStopped | UserError) and not isinstance(error, StateLost):
            raise
        check_ray(error, machines)
        if isinstance(error, StateLost | ray.exceptions.ObjectLostError):  # a machine that joined may be gone again
            raise _stop("a machine of the cluster is gone" if len(machines) > 1 else "Ray lost client states") from error
        raise


def check_ray(cause: Exception | None = None, machines: frozenset[str] = frozenset()) -> None:
    """Raise ``RunStopped`` if one of Ray's own processes ended, or if one of ``machines`` is gone.

    A Ray of one machine is not asked for it.
    """
    if dead := find_dead_processes():
        raise _stop(f"Ray's {dead[0]} was killed or crashed") from cause
    if len(machines) > 1 and machines - find_machines():
        raise _stop("a machine of the cluster is gone") from cause


def _stop(problem: str) -> RunStopped:
    fix = "Fix: give the same line again. With checkpoint_every and resume=latest it resumes"
    return RunStopped(f"engine=ray: {problem}. {fix}")
