"""Whole tensors of a run, of exports and of weights files, read one at a time, without torch."""
