"""Terminal output: sparklines, tables, numbers. Control characters in names are never passed to the terminal."""
