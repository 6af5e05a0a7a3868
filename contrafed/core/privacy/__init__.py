"""Choices of ``privacy``: Gaussian noise with a privacy budget, or Laplace noise without one."""
