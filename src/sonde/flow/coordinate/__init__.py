"""Coordinate checks: how sizes of activations depend on the width of a model."""
