"""Make every random draw a pure function of (seed, purpose, round, client).

No global generator is read or seeded. So a draw does not depend on the engine, the number of workers, the stacking of clients,
or a stop and resume. Every method sees the same clients and the same batches.
"""

import zlib

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
