"""Start Ray in this process or join a cluster, and stop it."""

import logging
import os
import signal
import sys
import threading
from typing import Any

from contrafed.core.errors import UserError
from contrafed.engines import ray_access

# Ray gives up a control store after a minute and a machine after seconds. Then it ends this process, and nothing is written.
# For a Ray that starts here ``ray_liveness`` notices both.
NEVER_SECONDS = 1_000_000


def start_ray(address: str | None, verbose: bool, memory_bytes: int | None, folder: str | None) -> None:
    """Start Ray in this process, or join a cluster. Does nothing if it already runs with the same object store.

    A Ray that starts here is closed to others (``ray_access``). A cluster's own token is in the environment.
    """
    if address is None:
        ray_access.set_token()
        # Ray's default, 15, leaves workers almost no time next to another busy process.
        os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    global _started
    if ray.is_initialized():
        if _started in (None, (address, memory_bytes, folder)):
            return
        stop_ray()
    options: dict[str, Any] = {"log_to_driver": verbose, "logging_level": logging.INFO if verbose else logging.ERROR}
    if address is None:  # a cluster that runs already has its own
        ray_access.check_token()
        ray_access.report_unused_address()
        options |= {"include_dashboard": False, "object_store_memory": memory_bytes, "object_spilling_directory": folder}
        options["_temp_dir"] = ray_access.make_session_folder()
        # Else Ray's control store keeps a record of every batch: 6.5 MB per 1,000 rounds (docs/RELIABILITY.md).
        options["_system_config"] = {
            "task_events_report_interval_ms": 0,
            "gcs_rpc_server_reconnect_timeout_s": NEVER_SECONDS,
            "health_check_failure_threshold": NEVER_SECONDS,
        }
    else:
        ray_access.probe(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
    ending = signal.getsignal(signal.SIGTERM)
    try:
        _connect(address, options)
    except ConnectionError as error:
        raise UserError(f"engine.address={address}: no Ray cluster answers there") from error
    except ray.exceptions.AuthenticationError as error:
        fix = "Fix: set RAY_AUTH_MODE=token and the cluster's RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH in the environment"
        raise UserError(f"engine.address={address}: the cluster refuses the token. {fix}") from error
    except UserError:
        raise
    except Exception as error:  # an address that is none, more memory than there is, a machine that is too busy
        raise UserError(f"engine=ray: Ray does not start ({' '.join(str(error).split())[:200]})") from error
    if not verbose:
        _hide_raylet_log()
    _started = (address, memory_bytes, folder)
    # Ray replaces the command's handler by its own, and SIGTERM would then end the process without writing.
    if callable(ending) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ending)


def _hide_raylet_log() -> None:
    """Have Ray not print a raylet's log when it was killed, because the error of the run says so in one line."""
    from ray._private import worker

    shown = worker.print_to_stdstream

    def print_other(data: Any, *arguments: Any, **options: Any) -> None:
        if not any("Raylet is terminated" in line for line in data["lines"]):
            shown(data, *arguments, **options)

    if shown.__name__ != print_other.__name__:
        worker.print_to_stdstream = print_other


def _connect(address: str | None, options: dict[str, Any]) -> None:
    """Call ``ray.init``; a Ray that starts here listens on the loopback interface alone."""
    import ray

    if address is not None:
        ray.init(address=address, **options)
        return
    with ray_access.on_loopback():
        # "local": with none Ray would join one that runs on this machine, which refuses these options.
        about = ray.init(address="local", **options)
    try:
        ray_access.check_loopback(about)
    except UserError:
        stop_ray()
        raise


# Of the Ray that runs: its address, the bytes of its object store, and where that spills; None: not started here.
_started: tuple[str | None, int | None, str | None] | None = None


def stop_ray() -> None:
    """Stop the Ray that ``start_ray`` started, if any."""
    if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        ray.shutdown()
    ray_access.remove_folders()
