"""The engines: virtual clients on Ray workers, in this process, in Flower's own runtime, and clients on devices."""
