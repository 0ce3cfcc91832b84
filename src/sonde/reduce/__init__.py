"""Tensor -> sketch, on the device it lives on, without a sync. `numpy.py` is the specification; the others are fast."""
