"""The options of `kvsearch evolve`; what is not typed is the recipe's, or a default of `search.recipe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsearch.cli import evaluate_options as own
from kvsearch.cli import task_options as asked

WHAT, LIMITS, WORK = "What is searched", "When to stop", "Who does the work"

Output = Annotated[Path, typer.Option("--output", "-o", help="Directory of the run.", show_default=False)]
Recipe = Annotated[
    str | None,
    typer.Option(
        help="A YAML file of these options, or a shipped one: paper-8b, bundled, ...; flags win over it.",
        show_default=False,
        rich_help_panel=WHAT,
    ),
]
Budget = Annotated[
    int | None,
    typer.Option(help="Entries to keep per kv head, on average.", min=1, show_default=False, rich_help_panel=WHAT),
]
Budgets = Annotated[
    str | None,
    typer.Option(
        metavar="N,N...",
        help="Several budgets in one run, each beginning with the result of the one before: writes plan-N.json and "
        "front.json.",
        show_default=False,
        rich_help_panel=WHAT,
    ),
]
Starts = Annotated[
    list[Path] | None,
    typer.Option(
        "--start",
        help="A plan to start from; repeatable. The policies of the first one are searched, unless --policy is given.",
        show_default=False,
        rich_help_panel=WHAT,
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        help="Eviction policy of all layers.",
        show_default="snapkv, or those of the first --start",
        rich_help_panel=WHAT,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A policy parameter, as in --set window=16; repeatable.", rich_help_panel=WHAT),
]
Space = Annotated[
    str | None,
    typer.Option(
        help="groups: one group of layers after the other; layers: all at once; heads: multipliers around the first "
        "--start; basis: the directions in which the --start plans differ.",
        show_default="groups",
        rich_help_panel=WHAT,
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option("--group-size", help="Layers of a group.", min=1, show_default="8, or all", rich_help_panel=WHAT),
]
Optimiser = Annotated[
    str | None,
    typer.Option(
        help="cma, random, coordinate, or golden for groups of one layer.", show_default="cma", rich_help_panel=WHAT
    ),
]
Objective = Annotated[
    str | None,
    typer.Option(
        help="What the search lowers or raises: nll or kl of the right answers (cheap), or metric, the task's own of "
        "free replies. The best are judged by the metric in any case.",
        show_default="nll",
        rich_help_panel=WHAT,
    ),
]
Generations = Annotated[int | None, typer.Option(help="Of each group.", min=1, show_default="10", rich_help_panel=WHAT)]
Population = Annotated[
    int | None,
    typer.Option(help="Of each generation.", min=1, show_default="4 + 3 ln dimension", rich_help_panel=WHAT),
]
Sigma = Annotated[
    float | None,
    typer.Option(help="First step, in units of the budget.", show_default="0.3", rich_help_panel=WHAT),
]
Parity = Annotated[
    bool, typer.Option("--parity", help="The paper's literal choices (soft total, cache term).", rich_help_panel=WHAT)
]
Minibatch = Annotated[
    int | None,
    typer.Option(
        help="Questions that a generation sees; its best is measured on all.",
        min=1,
        show_default="all",
        rich_help_panel=WHAT,
    ),
]
Finalists = Annotated[
    int | None,
    typer.Option(
        help="Candidates that are judged by the metric at the end.", min=1, show_default="8", rich_help_panel=WHAT
    ),
]
Tasks = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        metavar="SPEC",
        help="KIND or KIND:NAME,NAME, several joined by +: synthetic, ruler, longbench, gsm8k, niah, jsonl:FILE; see "
        "`kvsearch tasks`.",
        show_default="synthetic",
        rich_help_panel=asked.PANEL,
    ),
]
ProtocolName = Annotated[
    str | None,
    typer.Option(
        help="question-agnostic or question-aware.", show_default="question-agnostic", rich_help_panel=own.ASKED
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        help="Contexts per task in each of the three splits.", min=1, show_default="10", rich_help_panel=own.ASKED
    ),
]
MaxEvals = Annotated[
    int | None, typer.Option(help="Different candidates.", min=1, show_default=False, rich_help_panel=LIMITS)
]
MaxTime = Annotated[
    float | None, typer.Option(help="Seconds of search, all sessions.", show_default=False, rich_help_panel=LIMITS)
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Tokens read under candidates.", min=1, show_default=False, rich_help_panel=LIMITS),
]
Together = Annotated[
    int | None,
    typer.Option(
        help="Candidates of one job, at most: what a worker takes at a time.",
        min=1,
        show_default="4",
        rich_help_panel=WORK,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Evaluate on so many Ray workers, with a GPU each if the model is on one.",
        min=1,
        show_default="this process",
        rich_help_panel=WORK,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        help="A running Ray cluster: auto, or host:port.",
        show_default="one is started here",
        rich_help_panel=WORK,
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--job-timeout",
        help="Seconds after which the job of a Ray worker has failed.",
        show_default=False,
        rich_help_panel=WORK,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the directory.")]
Force = Annotated[bool, typer.Option("--force", help="Start anew, whatever run is in the directory.")]
