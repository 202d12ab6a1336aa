"""What a plan costs on this machine: time, memory, and how many prompts fit at once."""
