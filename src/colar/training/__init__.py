"""Training: one objective for all methods, supervised fine-tuning that survives a kill."""
