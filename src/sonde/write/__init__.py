"""Sketches, scalars and events -> disk, off the training thread. Never raises into it, never blocks it."""
