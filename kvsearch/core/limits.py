"""The ranges of what is read from files and options, stated once; docs/plan-format.md lists them.

They are what storage holds (int32, int64, fp32), or refuse a wrong file before memory or time is spent on it. Whatever
else a value may be, its field or its policy says. Sizes are in bytes.
"""

from __future__ import annotations

MOST_ENTRIES = 2**31 - 1  # entries, tokens and positions, and all that options count: these are stored as int32
MOST_NUMBER = 2**63 - 1  # any other whole number, a seed among them: what int64 holds
MOST_MEASURED = 1e12  # a value of an array, above or below 0: squares of it have room in fp32
MOST_LAYERS = 1024  # of a model: a file that names more would have as many made
MOST_HEADS = 1024  # kv heads of a layer

MOST_YAML = 1 << 18  # a recipe or strategy
MOST_DOCUMENT = 1 << 23  # a plan, a configuration, a result: what is one JSON value
MOST_DATA = 1 << 33  # texts, tasks, calibration data and ledgers
MOST_ARRAYS = 1 << 36  # profiles, weights and samples
MOST_HEADER = 100_000_000  # of a safetensors file, as that format has it
