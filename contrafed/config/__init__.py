"""Turn a command line into a checked configuration."""
