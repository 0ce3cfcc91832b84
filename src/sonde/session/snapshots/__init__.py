"""Whole tensors of chosen steps: planned, staged, copied and handed to the store."""
