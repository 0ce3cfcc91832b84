"""Measures of a window that several rules share. No rule, no I/O."""
