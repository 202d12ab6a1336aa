"""Evaluation: scores of plans and baselines on the same samples at the same number of entries, with intervals."""
