"""One file for each source of data, with ``Config`` and ``load(config, name) -> ImageData``."""
