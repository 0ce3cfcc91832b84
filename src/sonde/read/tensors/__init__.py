"""Whole tensors of a run, of its exports and of files of weights; read one at a time, without torch."""
