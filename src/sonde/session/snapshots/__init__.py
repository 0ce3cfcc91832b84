"""Whole tensors of chosen steps: planned, staged, copied and passed to the store."""
