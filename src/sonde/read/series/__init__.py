"""Series of a run: statistics and scalars by pattern and steps, as tables, windows and SQL."""
