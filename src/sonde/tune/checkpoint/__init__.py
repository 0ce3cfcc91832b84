"""Checkpoints that training continues from bit by bit: what is saved, where, and how long it is kept."""
