"""From a window of numbers to findings. Pure: reads no file, needs no torch."""
