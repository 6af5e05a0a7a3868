"""Notice that Ray itself ended, or that a worker does not run any more. Workers count heartbeats in Ray's key-value store."""

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from contrafed.core.errors import RunStopped

# Seconds between two heartbeats of a worker, and between two looks at the workers that the driver waits for.
BEAT_SECONDS = 5.0
# A worker without a heartbeat for so many seconds is replaced: it was stopped, or its machine is gone.
MAX_SILENT_SECONDS = 120.0
NAMESPACE = b"contrafed"
# Ray's processes without which nothing runs.
VITAL_PROCESSES = ("raylet", "gcs_server")


def start_heartbeats() -> None:
    """Count heartbeats of this worker in a thread of their own, with what is needed to end its process."""
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


@contextlib.contextmanager
def report_dead_ray() -> Iterator[None]:
    """Raise ``RunStopped`` where Ray's own processes ended, before the block or because it fails."""
    check_ray()
    try:
        yield
    except RunStopped:
        raise
    except Exception as error:
        check_ray(error)
        raise


def check_ray(cause: Exception | None = None) -> None:
    """Raise ``RunStopped`` if one of Ray's own processes ended."""
    if dead := find_dead_processes():
        fix = "Fix: give the same line again. With checkpoint_every and resume=latest it goes on"
        raise RunStopped(f"engine=ray: Ray's {dead[0]} was killed or crashed. {fix}") from cause
