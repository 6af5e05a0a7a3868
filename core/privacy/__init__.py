"""Node-level differential privacy by the Gaussian mechanism: what is chosen, and the two things it is made of."""
