"""Fine-tuning: the model, its data, the trainer and what it says."""
