"""Comparison of two runs or two sets of weights."""
