"""The run folder as a whole: what it holds at one moment, its state, its attempts and its small tables."""
