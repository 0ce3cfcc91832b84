"""Inspections: what the rules ask of a watched model and its data, measured in some of its steps."""
