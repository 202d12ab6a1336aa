"""Costs of a plan on this machine: time, memory, and the prompts that fit at once."""
