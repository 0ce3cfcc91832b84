"""The terminal: sparklines, tables, numbers in words. Names from a run are shown, never obeyed."""
