"""The options of `kvsearch evaluate`: what is compared, how it is asked, and what is kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from kvsearch.errors import UsageError

COMPARED, ASKED, KEPT = "What is compared", "How it is asked", "What is kept and shown"

Model = Annotated[str, typer.Argument(help="A hub id, a local directory, or `bundled`.", show_default=False)]
Plans = Annotated[
    list[Path] | None,
    typer.Option("--plan", help="A plan file; repeatable.", show_default=False, rich_help_panel=COMPARED),
]
Methods = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Methods to compare: uniform, pyramid, adakv, ada-pyramid, cake, lava, lava-uniform, lava-pyramid, "
        "lava-equal-heads, any policy (with even budgets), random; METHOD:POLICY puts another policy under a method's "
        "budgets, NAME=DIR looks budgets up in a profile of `calibrate`.",
        show_default=False,
        rich_help_panel=COMPARED,
    ),
]
Budgets = Annotated[
    str | None,
    typer.Option(
        metavar="N,...",
        help="Sizes of the methods: entries per kv head, on average.",
        show_default=False,
        rich_help_panel=COMPARED,
    ),
]
Ratios = Annotated[
    str | None,
    typer.Option(
        metavar="R,...",
        help="Sizes of the methods: shares of the prompt to evict.",
        show_default=False,
        rich_help_panel=COMPARED,
    ),
]
Phases = Annotated[
    str | None,
    typer.Option(
        help="When the methods evict, all alike: prefill, decode or both.",
        show_default="prefill",
        rich_help_panel=COMPARED,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of all methods that have it (window=8), or of one (lava.window=8); repeatable.",
        rich_help_panel=COMPARED,
    ),
]
Baselines = Annotated[
    str | None,
    typer.Option(
        help="What plans are compared with, at their entries: uniform, snapkv, streaming, random.",
        show_default="uniform,snapkv,streaming",
        rich_help_panel=COMPARED,
    ),
]
Subject = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The method (or plan, by its file's name) that all others are compared with.",
        show_default="the first",
        rich_help_panel=COMPARED,
    ),
]
ProtocolName = Annotated[
    str | None,
    typer.Option(
        help="question-agnostic: the context is compressed first, then the questions are asked; question-aware: "
        "context and question are compressed as one.",
        show_default="question-agnostic",
        rich_help_panel=ASKED,
    ),
]
Samples = Annotated[int, typer.Option(help="Contexts per task.", min=1, rich_help_panel=ASKED)]
MaxLength = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of prompt and reply together; the middle of longer contexts is cut out. At most, and by "
        "default, what the model takes.",
        min=1,
        show_default=False,
        rich_help_panel=ASKED,
    ),
]
Batch = Annotated[int, typer.Option(help="Prompts per forward pass.", min=1, rich_help_panel=ASKED)]
MaxMemory = Annotated[
    float | None,
    typer.Option(
        metavar="GB",
        help="Most memory for compressed caches at a time; prompts are read again for methods that do not fit.",
        show_default="8.6, of a GPU half of what is free",
        rich_help_panel=ASKED,
    ),
]
Continuation = Annotated[
    int | None,
    typer.Option(
        help="--tasks ppl:FILE: tokens to predict after each context.",
        min=1,
        show_default="128",
        rich_help_panel=ASKED,
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(
        help="--tasks ppl:FILE: tokens from one context's beginning to the next.",
        min=1,
        show_default="no overlap",
        rich_help_panel=ASKED,
    ),
]
Directory = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Keep the run here, reply by reply; the same command goes on where it stopped.",
        show_default=False,
        rich_help_panel=KEPT,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Start the run in --output anew.", rich_help_panel=KEPT)]
Reuse = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Take finished replies from the --output of another run where they would be the same.",
        show_default=False,
        rich_help_panel=KEPT,
    ),
]
SamplesFile = Annotated[
    Path | None,
    typer.Option(
        "--samples-file",
        help="Write every reply to this .csv or .parquet file.",
        show_default=False,
        rich_help_panel=KEPT,
    ),
]
TableFile = Annotated[
    Path | None,
    typer.Option(
        "--table",
        metavar="FILE",
        help="Write the tables to this .md or .tex file, or every number of them to this .csv file.",
        show_default=False,
        rich_help_panel=KEPT,
    ),
]
ColumnsName = Annotated[
    str | None,
    typer.Option(
        "--columns",
        help="Columns of the tables: tasks (and means), categories (and averages) or averages.",
        show_default="tasks; on the screen categories if there are many",
        rich_help_panel=KEPT,
    ),
]
Losses = Annotated[
    bool,
    typer.Option(
        "--losses",
        help="Measure, too, what every layer's attention output loses under every method.",
        rich_help_panel=KEPT,
    ),
]


def memory_bytes(gigabytes: float | None) -> int | None:
    """Bytes of --max-memory; UsageError if it is not above 0."""
    if gigabytes is None:
        return None
    if not 0 < gigabytes < math.inf:
        raise UsageError(f"--max-memory {gigabytes:g} must be above 0 GB")
    return int(gigabytes * 10**9)


def refuse_perplexity_options(continuation: int | None, stride: int | None) -> None:
    """UsageError if options of `ppl:FILE` are given for other tasks."""
    given = {"--continuation": continuation, "--stride": stride}
    for flag, value in given.items():
        if value is not None:
            raise UsageError(f"{flag} is for --tasks ppl:FILE")
