"""Whole tensors on their way to disk or to a bucket. One store, one file."""
