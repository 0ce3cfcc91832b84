"""What the rules need of data, outputs, units, attention and losses, as a few numbers per step."""
