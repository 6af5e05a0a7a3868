"""The client side: local training, written once over a leading client axis."""
