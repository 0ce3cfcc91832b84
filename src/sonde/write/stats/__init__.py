"""Sketches and scalars on their way to disk: logs, sealed segments, the pyramid and the catalog."""
