"""Losses, inputs and targets, taken where the user's program computes them."""
