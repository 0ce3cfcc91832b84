"""One watched model: its taps, its measurements, and the names they are recorded under."""
