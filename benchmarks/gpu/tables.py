"""Part 5: docs/gpu.md of what the other parts found, and of arithmetic where nothing was measured.

python benchmarks/gpu/tables.py [--out benchmarks/gpu/results]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from steps import PACKAGES, RESULTS, ROOT

from kvsearch.benchmark.cache_costs import Roofline
from kvsearch.benchmark.speed import estimate_prompt_work, estimate_token_work
from kvsearch.models.architecture import describe
from kvsearch.models.shapes import make_bare_model
from kvsearch.policies import create_policy
from kvsearch.runtime import Program
from kvsearch.runtime.program import estimate_prompt_bytes, make_full_program

PAGE = ROOT / "docs" / "gpu.md"
MARK = "<!-- made by benchmarks/gpu/tables.py -->\n"
H200 = Roofline(4.3e12, 8e14)
SMALL_KERNELS = 40  # of a layer in a step, beside attention and products
LAUNCH = 2e-6  # seconds of one
LENGTHS = {"32k": 32_768, "128k": 131_072}
Rows = list[dict[str, Any]]


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return rows as Markdown; columns are those of the first, or as given."""
    names = columns or list(rows[0])
    lines = [names, ["---"] * len(names), *([shown(row.get(name)) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(value: Any) -> str:
    if not isinstance(value, float):
        return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    if value == 0 or abs(value) >= 0.1:
        return f"{value:,.2f}"
    return f"{value:.2g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def floors(machine: Roofline) -> str:
    """Return the floors of prompts and tokens of the shape of Llama-3.1-8B."""
    model = make_bare_model("llama-3.1-8b")
    shape = describe(model)
    tenth = Program.uniform(model, create_policy("snapkv"), lambda length: length // 10)
    rows = []
    for tokens, length in LENGTHS.items():
        for batch in (1, 16):
            for kept, program, entries in (("all", make_full_program(model), length), ("10%", tenth, length // 10)):
                read, operations = estimate_token_work(
                    model, batch, entries, estimate_prompt_bytes(model, program, [length] * batch)
                )
                token = machine.floor(read, operations)
                prompt = machine.floor(*estimate_prompt_work(model, batch, length))
                rows.append(
                    {
                        "tokens": tokens, "batch": batch, "kept": kept, "GB per token": read / 1e9,
                        "floor, ms per token": 1e3 * token, "GFLOP per token": operations / 1e9,
                        "with small kernels, ms": 1e3 * (token + shape.layers * SMALL_KERNELS * LAUNCH),
                        "floor, s for the prompts": prompt,
                    }
                )  # fmt: skip
    return table(rows)


def results(folder: Path) -> dict[str, Any]:
    """Return what every step found, by SCRIPT-STEP."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def measured(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is said of results."""
    for name, made in found.items():
        if isinstance(made, dict) and "failed" in made:
            yield f"`{name}` failed: {made['failed'].splitlines()[-1]}"
    done = {name: made for name, made in found.items() if not (isinstance(made, dict) and "failed" in made)}
    for name, made in done.items():
        script, _, step = name.partition("-")
        if step == "versions":
            yield f"**{script}** ran on {made.get('name', made['device'])} ({made['nvidia-smi']}): " + ", ".join(
                f"{package} {made[package]}" for package in PACKAGES
            )
        elif "costs" in made:
            yield f"**{name}**: {bench_line(made)}\n\n{bench_table(made['costs'])}"
        elif name in ("correctness-attention", "correctness-scoring"):
            yield f"**{name}**, the largest error of all shapes\n\n{table(find_largest_errors(made))}"
        elif isinstance(made, list):
            yield f"**{name}**\n\n{table(made)}"
        elif name.startswith("correctness"):
            yield f"**{name}**\n\n```\n{json.dumps(made, indent=1)}\n```"
        else:
            yield f"**{name}**\n\n{table([made])}"


def find_largest_errors(rows: Rows) -> Rows:
    """Return one row for each value of the first column: the largest error of all its shapes, by kind."""
    (first, *_) = rows[0]
    kinds = [name for name, value in rows[0].items() if isinstance(value, float)]
    errors: dict[str, dict[str, float]] = {}
    for row in rows:
        largest = errors.setdefault(row[first], dict.fromkeys(kinds, 0.0))
        largest.update({kind: max(largest[kind], row[kind]) for kind in kinds})
    return [{first: value, **largest} for value, largest in errors.items()]


def bench_line(made: Mapping[str, Any]) -> str:
    machine = made["machine"]
    return (
        f"{machine['model']}, {machine['dtype']}, {machine['bandwidth'] / 1e9:,.0f} GB/s, "
        f"{machine['flops'] / 1e12:,.0f} TFLOP/s, {machine['new_tokens']} new tokens"
    )


def bench_table(costs: Rows) -> str:
    rows = [
        {
            "cache": cost["cache"], "batch": cost["batch"], "tokens": cost["length"],
            "peak GB": cost["peak_bytes"] / 1e9,
            "prompt s": cost["prefill_seconds"], "share of its floor": cost["prefill_floor_share"],
            "ms per token": 1e3 * cost["token_seconds"], "speed": cost["token_speedup"],
            "floor ms": 1e3 * cost["floor_seconds"], "share": cost["floor_share"],
        }
        for cost in costs
    ]  # fmt: skip
    return table(rows)


def page(found: Mapping[str, Any]) -> str:
    """Return the page: its text up to the mark as it is, and what was computed and measured."""
    text, _, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    said = "\n\n".join(measured(found)) if found else "Nothing was measured on a GPU yet."
    return f"{text}{MARK}\n{floors(H200)}\n\n## Measured\n\n{said}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    PAGE.write_text(page(results(parser.parse_args().out)), encoding="utf-8")
