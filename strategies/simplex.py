"""The quadratic program over mixtures that FedPAC solves for every node."""

import numpy as np
from scipy.linalg import LinAlgError, cholesky, solve_triangular
from scipy.optimize import nnls

# Added to the diagonal, relative to its mean: two nodes alike make the matrix singular.
RIDGE = 1e-9


def simplex_minimum(matrix: np.ndarray) -> np.ndarray | None:
    """Return the a (m,) that minimises a' P a with a >= 0 and sum a = 1, for a symmetric ``matrix`` P (m, m).

    With P = R'R it is, up to its length, the non-negative least-squares solution of R x = R^-T 1. None where P is not finite or
    not positive definite, and where the solver gives up.
    """
    size = len(matrix)
    if not np.isfinite(matrix).all():
        return None
    try:
        root = cholesky(matrix + RIDGE * np.trace(matrix) / size * np.eye(size))
        found, _ = nnls(root, solve_triangular(root, np.ones(size), trans="T"))
    except (LinAlgError, RuntimeError):
        return None
    return found / found.sum() if np.isfinite(found).all() and found.sum() > 0 else None
