"""Losses, inputs and targets, read where the user's program computes them."""
