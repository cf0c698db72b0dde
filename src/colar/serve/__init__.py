"""`colar serve`: checkpoints behind the OpenAI API. Needs the extra `serve`."""
