"""The engines: virtual nodes on Ray workers, in this process, or in Flower's own runtime."""
