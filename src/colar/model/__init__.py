"""Where weights come from, and the language model with the modules of its method."""
