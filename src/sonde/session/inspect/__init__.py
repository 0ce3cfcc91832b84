"""Inspections: measurements of a watched model and its data that the rules need, taken at some steps."""
