"""Metrics of modules by name, over micro-batches and steps."""
