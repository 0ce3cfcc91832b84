"""Observers of the recorded data, on the writer thread: live rules, mirrors, non-finite values."""
