"""One watched model: its taps, what is measured of it, and under which names."""
