"""The server side: the strategy that every method builds on."""
