"""Checkpoints from which training resumes bit by bit: contents, storage, and retention."""
