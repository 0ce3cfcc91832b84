"""The faults, by what they touch. Importing a file registers its faults."""
