"""Recording of a run's data: inputs, outputs, batches, and losses that the program does not log itself."""
