"""docs/memory.md says what runs need; `python -m tests.docs.test_memory` writes its tables."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvsearch.benchmark import capacity
from kvsearch.benchmark.speed import Workload
from kvsearch.models.shapes import make_bare_model
from kvsearch.policies import create_policy
from kvsearch.runtime import Program
from kvsearch.runtime.program import estimate_memory, make_full_program
from tests.docs.test_links import DOCS

PAGE = DOCS / "memory.md"
MARKS = ("<!-- table of prompts -->", "<!-- table of verbs -->")
END = "<!-- made by tests/docs/test_memory.py -->"
SHAPES = {"8B": "llama-3.1-8b", "70B": "llama-3.1-70b"}
LENGTHS = {"32k": 32_768, "128k": 131_072}
CHUNK = 4096
KEPT = 0.1


def tenth(model: Any) -> Program:
    """SnapKV with a tenth of the entries."""
    return Program.uniform(model, create_policy("snapkv"), lambda length: round(KEPT * length))


def gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f}"


def prompts() -> list[str]:
    lines = [
        "| model | tokens | batch | kept | weights | cache | to read: whole | in chunks | all: whole | in chunks |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, shape in SHAPES.items():
        model = make_bare_model(shape)
        for tokens, length in LENGTHS.items():
            for batch in (1, 16):
                for kept, program in (("all", make_full_program(model)), ("10%", tenth(model))):
                    whole, parts = (estimate_memory(model, program, [length] * batch, chunk) for chunk in (None, CHUNK))
                    read = [gigabytes(needs.total - needs.weights - needs.cache) for needs in (whole, parts)]
                    totals = [gigabytes(needs.total) for needs in (whole, parts)]
                    cells = [name, tokens, str(batch), kept, gigabytes(whole.weights), gigabytes(whole.cache)]
                    lines.append(f"| {' | '.join([*cells, *read, *totals])} |")
    return lines


def verbs() -> list[str]:
    model = make_bare_model(SHAPES["8B"])
    length = LENGTHS["32k"]
    full = make_full_program(model)
    some = tenth(model)

    def taken(program: Program, batch: int = 1, chunk: int | None = None) -> int:
        return estimate_memory(model, program, [length] * batch, chunk).total

    with patch.object(capacity, "measure_free_bytes", lambda _: 10**15):
        bench = capacity.require_memory(model, {"plan": some}, Workload(1, length, 32, 5), torch.device("cpu"))[
            "memory"
        ]
    batches = (
        "8 prompts, halved where they do not fit, under several methods, whose caches take up to half of a free GPU"
    )
    rows = [
        ("generate, compress", "one prompt; in chunks of 4,096", taken(some), taken(some, chunk=CHUNK)),
        ("generate without a plan", "one prompt; in chunks of 4,096", taken(full), taken(full, chunk=CHUNK)),
        ("evaluate, select, validate, run", f"one prompt; {batches}", taken(some), taken(some, 8)),
        ("headroom, calibrate", "one context, in full; 8 of PolyKV's `--batch`", taken(full), taken(full, 8)),
        ("evolve", "one prompt; the best entries of others in up to half of what is free", taken(some)),
        ("bench", "DynamicCache, StaticCache, ours and a plan, all at once", sum(bench.values())),
    ]
    lines = ["| verb | what is there at once | GB |", "|---|---|---|"]
    return lines + [f"| {verb} | {what} | {'; '.join(map(gigabytes, sizes))} |" for verb, what, *sizes in rows]


def with_tables(text: str) -> str:
    for mark, table in zip(MARKS, (prompts, verbs), strict=True):
        before, _, rest = text.partition(mark)
        text = "\n".join([f"{before}{mark}\n", *table(), "", f"{END}{rest.partition(END)[2]}"])
    return text


@pytest.mark.slow
def test_the_tables_are_those_of_the_arithmetic() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_tables(text), "run python -m tests.docs.test_memory"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
