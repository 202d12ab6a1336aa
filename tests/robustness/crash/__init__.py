"""Commands that are stopped at every write, and what is there afterwards."""
