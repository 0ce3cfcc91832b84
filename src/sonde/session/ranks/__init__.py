"""Ranks of a distributed job other than the first."""
