"""Who may reach the Ray that starts here: this user's processes on this machine alone; imports no Ray.

Ray by default listens on all interfaces, asks for no password, and makes its session folder writable for everybody. Whoever
reaches it runs code as the user. docs/RELIABILITY.md has what was tried.
"""

import atexit
import contextlib
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from contrafed.core.errors import UserError

TOKEN_BYTES = 32
# Seconds in which a Ray cluster must accept a connection.
PROBE_SECONDS = 4.0
# A Unix socket's path has at most 107 bytes on Linux and 103 on macOS. Ray adds about 75 to its folder.
MAX_TEMPORARY_PATH = 20

# The private folders that were made here and are not deleted yet.
_folders: list[Path] = []


def set_token() -> None:
    """Have Ray ask for a token that only this process and its children know. Does nothing once Ray is imported.

    Ray reads these variables when it is imported. A token that the user has set stays.
    """
    if "ray" in sys.modules:
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(TOKEN_BYTES)
    atexit.register(remove_folders)  # before Ray registers its own shutdown, which then runs first


def check_token() -> None:
    """Raise ``UserError`` if Ray was imported without a token, since it would accept anyone."""
    from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]

    if get_authentication_mode() != AuthenticationMode.TOKEN:
        raise UserError(
            "engine: Ray was imported before it had a token, and would run anybody's code. Fix: import ray later, or set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN=SECRET before you import it"
        )


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Have ``ray.init`` listen on the loopback interface alone, as it does by default on macOS and Windows."""
    from ray._private import ray_constants

    with mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False):
        yield


def check_loopback(about: Any) -> None:
    """Raise ``UserError`` where Ray, by what ``ray.init`` returned, listens on another interface."""
    address = about.address_info["node_ip_address"]
    if address not in ("127.0.0.1", "::1"):
        raise UserError(f"engine: Ray listens on {address}, not on the loopback interface. Fix: use Ray 2.55")


def make_session_folder() -> str:
    """Return a new folder for Ray's sessions. Ray opens its folder to everybody, so the folder around it is private."""
    root = tempfile.gettempdir()
    private = Path(tempfile.mkdtemp(prefix="contrafed-", dir=root if len(root) <= MAX_TEMPORARY_PATH else "/tmp"))
    _folders.append(private)
    return str(private / "ray")


def remove_folders() -> None:
    """Delete the folders that ``make_session_folder`` made, once no Ray uses them."""
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


def probe(address: str) -> None:
    """Raise ``UserError`` where nothing listens at ``address``, HOST:PORT or ray://HOST:PORT; Ray itself takes much longer."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():  # auto, or what Ray itself refuses at once
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"engine.address={address}: nothing answers there ({error}). Fix: give HOST:PORT of the cluster's head, or auto"
        ) from error


def report_unused_address() -> None:
    """Print a line where ``RAY_ADDRESS`` names a cluster that this run does not join."""
    if found := os.environ.get("RAY_ADDRESS"):
        print(f"RAY_ADDRESS={found} is not used: Ray starts here. To join that cluster set engine.address=auto", flush=True)
