"""Measures of a window that several rules share. Contains no rules and no I/O."""
