"""Numbers that the rules need about data, outputs, units, attention and losses, a few per step."""
