"""Ways of learning to think and of thinking: one file a method, one line in the registry."""
