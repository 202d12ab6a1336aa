"""The closed vocabulary of the bundled models' language, 302 words: one token per word."""

from __future__ import annotations

from kvsearch.tasks.dataset_task import read_shipped

_LISTS = {name: tuple(words.split()) for name, words in read_shipped("vocabulary").items()}
PAD, BOS, EOS, UNK = _LISTS["special"]
ORDINALS = _LISTS["ordinals"]
NUMBERS = _LISTS["numbers"]
KEYS = _LISTS["keys"]
VALUES = _LISTS["values"]
VARIABLES = _LISTS["variables"]
CANDIDATES = _LISTS["candidates"]
NOUNS = _LISTS["nouns"]
VERBS = _LISTS["verbs"]
ADJECTIVES = _LISTS["adjectives"]
PLACES = _LISTS["places"]
WORDS = tuple(word for words in _LISTS.values() for word in words)
