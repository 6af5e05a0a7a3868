"""One file for each schedule: a ``Config``, and what decides when the server aggregates."""
