"""The ranges of what is read from files and options, stated once; docs/plan-format.md lists them.

They are far above what models and runs have, and low enough that a wrong file is refused before memory or time is spent
on it. Sizes are in bytes.
"""

from __future__ import annotations

# --- numbers ----------------------------------------------------------------------------------------------------------

MOST_ENTRIES = 2**31 - 1  # entries, tokens and positions: these are stored as int32
MOST_NUMBER = 2**63 - 1  # any other whole number, a seed among them: what int64 holds
MOST_SAMPLES = 100_000  # contexts of a task
MOST_PARAMETERS = 64  # of a policy or an allocation
MOST_SETTINGS = 4096  # of a calibration or search, as provenance has them
MOST_ROWS = 8192  # query rows that a policy looks at, and keeps while decoding
# parameters of policies by name: widths of pooling, positions to come, a seed; of all others MOST_ENTRIES
MOST_OF = {"kernel": 1023, "future": 65_536, "seed": MOST_NUMBER}

# --- shapes -----------------------------------------------------------------------------------------------------------

MOST_LAYERS = 1024  # of a model
MOST_HEADS = 1024  # kv heads of a layer
MOST_WIDTH = 65_536  # dimensions of a head
MOST_TOTAL = MOST_LAYERS * MOST_HEADS * MOST_ENTRIES  # entries of a plan
MOST_DIMENSIONS = 8  # of an array
MOST_MEASURED = 1e12  # a value of an array, above or below 0: squares of it have room in fp32

# --- texts and files --------------------------------------------------------------------------------------------------

MOST_PATH = 4096  # letters of a path in a file
MOST_YAML = 1 << 18  # a recipe or strategy
MOST_BRACKETS = 64  # open at a place of it
MOST_DOCUMENT = 1 << 23  # a plan, a configuration, a result: what is one JSON value
MOST_DATA = 1 << 33  # texts, tasks, calibration data and ledgers
MOST_ARRAYS = 1 << 36  # profiles, weights and samples
MOST_HEADER = 100_000_000  # of a safetensors file, as that format has it
