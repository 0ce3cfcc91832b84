"""Reads tensors from a running model. Never computes on them, never stores them, never leaves a trace on the model."""
