"""What a model thinks and how it fares: retrieval, norms, pictures."""
