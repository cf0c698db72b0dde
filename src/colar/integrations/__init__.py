"""Where colar meets other people's programs."""
