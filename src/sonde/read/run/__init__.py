"""The run folder as a whole: its contents at one moment, its status, its attempts and its small tables."""
