"""Where a model's files lie, and what they say about it."""
