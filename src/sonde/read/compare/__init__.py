"""Two runs, or two sets of weights, side by side."""
