"""What can be asked for: one file per verb, with its options and the function that does it."""
