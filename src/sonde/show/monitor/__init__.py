"""Runs in a terminal, live: `sonde monitor`."""
