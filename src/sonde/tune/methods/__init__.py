"""Ways of fine-tuning. Each file holds one class `Method` and is named as `training_method` names it."""
