"""Jobs: one file per verb, with its options and its function."""
