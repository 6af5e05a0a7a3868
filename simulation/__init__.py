"""The engines: virtual nodes on Ray workers, in this process, or in Flower's own runtime."""

if __name__ == "simulation":
    raise ImportError("this package is imported as contrafed.simulation")
