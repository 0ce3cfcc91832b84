"""The live terminal view: `sonde monitor`."""
