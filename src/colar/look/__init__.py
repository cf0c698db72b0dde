"""Looking into thoughts: read as tokens, replaced by others, put down to what went wrong."""
