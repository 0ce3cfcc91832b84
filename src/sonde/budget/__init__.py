"""The cost of recording, and what the next step may record. Clocks and arithmetic; knows no model and no file."""
