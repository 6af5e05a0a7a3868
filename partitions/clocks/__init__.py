"""One file for each clock: a ``Config``, and a ``Clock`` of contrafed.data.clock."""
