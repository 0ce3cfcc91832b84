"""Figures for papers and notebooks, by matplotlib."""
