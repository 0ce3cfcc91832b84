"""Figures for papers and notebooks, drawn with matplotlib."""
