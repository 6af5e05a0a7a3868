"""Engines: virtual clients on Ray workers, in this process or in Flower's own runtime, and clients on devices."""
