"""Series of a run: statistics and scalars by pattern, over steps, as tables, windows and SQL."""
