"""A problem as token ids: the layout of the text, and the tokens that no text may contain."""
