"""Analyzers of one batch: feed-forward, recurrent, attention, and two models side by side."""
