"""One file per source of data: ``Config`` and ``load(config, name) -> ImageData``."""
