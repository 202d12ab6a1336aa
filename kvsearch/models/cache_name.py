"""The argument in which models of transformers take their cache."""

from transformers.generation.utils import ALL_CACHE_NAMES

CACHE = str(ALL_CACHE_NAMES[0])  # past_key_values before transformers 5.24
