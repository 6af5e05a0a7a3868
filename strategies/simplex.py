"""Solve the quadratic program over mixtures that FedPAC has for every client."""

import numpy as np
from scipy.linalg import LinAlgError, cholesky, solve_triangular
from scipy.optimize import nnls

# Added to the diagonal, relative to its mean, because two equal clients make the matrix singular.
RELATIVE_RIDGE = 1e-9


def minimize_on_simplex(matrix: np.ndarray) -> np.ndarray | None:
    """Minimise a' P a over a >= 0 with sum a = 1.

    With P = R'R the solution is, up to scale, the non-negative least-squares solution of R x = R^-T 1.

    Args:
        matrix: P, symmetric (m, m).

    Returns:
        a (m,), or None if P is not finite or not positive definite, or if the solver fails.
    """
    size = len(matrix)
    if not np.isfinite(matrix).all():
        return None
    try:
        root = cholesky(matrix + RELATIVE_RIDGE * np.trace(matrix) / size * np.eye(size))
        found, _ = nnls(root, solve_triangular(root, np.ones(size), trans="T"))
    except (LinAlgError, RuntimeError):
        return None
    return found / found.sum() if np.isfinite(found).all() and found.sum() > 0 else None
