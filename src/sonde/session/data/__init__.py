"""What is seen of a run's data: inputs, outputs, batches, and the losses that nobody logs."""
