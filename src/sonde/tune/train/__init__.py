"""Fine-tuning: the model, its data, the trainer and its console output."""
