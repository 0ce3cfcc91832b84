"""Rules that turn a window of numbers into findings. Pure: reads no files and does not need torch."""
