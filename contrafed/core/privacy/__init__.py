"""What ``privacy`` may choose: Gaussian noise with a budget, or Laplace noise without; and what noise is made of."""
