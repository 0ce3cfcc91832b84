"""Turns tensors into sketches on their own device, without a sync. `numpy.py` is the specification; the others are
fast."""
