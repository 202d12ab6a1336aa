"""One token at a time: the eviction rule, captured steps, replies."""
