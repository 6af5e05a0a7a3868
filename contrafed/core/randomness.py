"""Make every random draw a pure function of (seed, purpose, round, client).

No global generator is read or seeded. So a draw does not depend on the engine, the number of workers, the stacking of clients,
or a stop and resume. Every method sees the same clients and the same batches.
"""

import contextlib
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def _sequence(seed: int, purpose: str, server_round: int, client: int) -> np.random.SeedSequence:
    # crc32 rather than hash(): Python salts the hash of strings per process.
    numbers = [seed, zlib.crc32(purpose.encode()), server_round, client]
    # An array gives the same draws in half the time. Larger seeds take more than one of its words.
    small = min(numbers) >= 0 and max(numbers) < 2**32
    return np.random.SeedSequence(np.array(numbers, dtype=np.uint32) if small else numbers)  # type: ignore[arg-type]


def generator(seed: int, purpose: str, server_round: int = 0, client: int = 0) -> np.random.Generator:
    """Return the NumPy generator of (seed, purpose, round, client). All four are non-negative."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, server_round, client)))


def torch_generator(seed: int, purpose: str, server_round: int = 0, client: int = 0) -> torch.Generator:
    """Return the torch CPU generator of (seed, purpose, round, client)."""
    state = _sequence(seed, purpose, server_round, client).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) & 0x7FFF_FFFF_FFFF_FFFF)


def read_global_state() -> tuple[Any, ...]:
    """Return the state of all global generators, torch's, NumPy's and Python's, in a form that can be compared."""
    numpy: Any = np.random.get_state()  # noqa: NPY002, which is what must stay untouched
    return torch.get_rng_state().numpy().tobytes(), numpy[1].tobytes(), numpy[2], random.getstate()


@contextlib.contextmanager
def keeping_global_state() -> Iterator[None]:
    """Put the global generators of torch, NumPy and Python back when the block ends."""
    numpy: Any = np.random.get_state()  # noqa: NPY002
    ours, python = torch.get_rng_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(ours)
        np.random.set_state(numpy)  # noqa: NPY002
        random.setstate(python)


def draw_attackers(fraction: float, num_clients: int, seed: int) -> tuple[int, ...]:
    """Return a fraction of the clients, ascending. Those of a smaller fraction are among them."""
    order = generator(seed, "attackers").permutation(num_clients)
    return tuple(sorted(order[: round(fraction * num_clients)].tolist()))
