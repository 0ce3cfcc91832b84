"""Analyses of whole tensors: pure functions over numpy arrays, and drivers that feed them block by block."""
