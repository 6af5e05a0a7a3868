"""Record where a run's numbers come from: the machine, and the commit of a checkout."""

import functools
import platform
import subprocess
from pathlib import Path

from contrafed.core.weighted_sum import cores

_HOME = Path(__file__).resolve().parents[3]


@functools.lru_cache
def commit() -> str | None:
    """Return the checkout's commit, with a + if tracked files differ from it. None outside a checkout or without git."""
    if not (_HOME / ".git").exists():  # a package below another checkout does not have its commit
        return None
    try:
        head, changed = (
            subprocess.run(["git", "-C", str(_HOME), *args], capture_output=True, timeout=10, check=True).stdout
            for args in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.decode().strip() + ("+" if changed.strip() else "")


def hardware(device: str) -> str:
    """Return the processor, the number of its cores for this process, and the accelerator of a ``device`` such as cuda:0."""
    count = cores()
    named = f"{_processor()}, {count} core{'s' if count > 1 else ''}"
    if not device.startswith("cuda"):
        return named
    import torch

    return f"{torch.cuda.get_device_name(device)}; {named}"


@functools.lru_cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
