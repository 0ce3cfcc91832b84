"""Weights files as lazy tensors, one module per format. Nothing in a file is ever executed."""
