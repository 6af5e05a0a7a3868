"""How like two pictures are: mean squared error, peak signal-to-noise ratio and structural similarity."""

import math

import numpy as np
from scipy.ndimage import gaussian_filter

# Wang et al. 2004: the Gaussian window's deviation and reach in pixels, and the constants K_1, K_2.
WINDOW, REACH, K1, K2 = 1.5, 5, 0.01, 0.03


def mse(a: np.ndarray, b: np.ndarray) -> float:
    """Return the mean squared difference of two arrays of one shape."""
    return float(np.square(np.subtract(a, b, dtype=np.float64)).mean())


def psnr(error: float) -> float:
    """Return the peak signal-to-noise ratio in dB of a mean squared error between pictures in [0, 1]; infinite at 0."""
    return math.inf if error == 0 else -10 * math.log10(error)


def ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Return the mean structural similarity of pictures (C, H, W) in [0, 1], channel by channel; 1 for equal ones.

    Source: Wang et al. 2004, Equation 13, with its Gaussian window of 11x11 and deviation 1.5; borders are mirrored.
    """

    def local(picture: np.ndarray) -> np.ndarray:
        return gaussian_filter(picture, (0, WINDOW, WINDOW), radius=(0, REACH, REACH))

    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    mean_x, mean_y = local(x), local(y)
    var_x, var_y, both = local(x * x) - mean_x**2, local(y * y) - mean_y**2, local(x * y) - mean_x * mean_y
    c1, c2 = K1**2, K2**2
    found = (2 * mean_x * mean_y + c1) * (2 * both + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    return float(found.mean())


def best_constant(picture: np.ndarray) -> np.ndarray:
    """Return the picture (C, H, W) of one colour that is nearest to ``picture`` in squared error: its mean colour."""
    return np.broadcast_to(picture.mean((1, 2), keepdims=True), picture.shape)
