"""Execute one run, from its configuration to its folder."""
