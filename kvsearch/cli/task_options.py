"""The options that say what is asked of a model: which tasks, and what they are made of."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsearch.errors import UsageError

if TYPE_CHECKING:
    from kvsearch.tasks.catalog import TaskOptions

PANEL = "Tasks"

Tasks = Annotated[
    str,
    typer.Option(
        "--tasks",
        metavar="SPEC",
        help="KIND or KIND:NAME,NAME, several joined by +: synthetic, synthetic:ruler, ruler, ruler:no-qa, longbench, "
        "longbench:english, longbench:e, gsm8k, niah, jsonl:FILE; see `kvsearch tasks`.",
        rich_help_panel=PANEL,
    ),
]
Length = Annotated[
    str | None,
    typer.Option(
        "--length",
        metavar="N[,N...]",
        help="Tokens of a context (synthetic, niah) or of a whole prompt (ruler); several for niah.",
        show_default="synthetic 1024, ruler 4096, niah 1000,2000,4000,8000",
        rich_help_panel=PANEL,
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        help="Part of the examples: train, select, report or all; synthetic has calibrate in place of all.",
        show_default="synthetic and ruler: report, others: all",
        rich_help_panel=PANEL,
    ),
]


@dataclass(frozen=True)
class TaskDetails:
    """The options that only some of the tasks read."""

    data: Annotated[
        str | None,
        typer.Option(
            help="longbench, gsm8k: a file or folder, or a dataset id of the hub.",
            show_default="the hub's own",
            rich_help_panel=PANEL,
        ),
    ] = None
    data_revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of a dataset of the hub.", show_default=False, rich_help_panel=PANEL),
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="longbench: a JSON file of prompts in place of kvsearch's.", show_default=False, rich_help_panel=PANEL
        ),
    ] = None
    haystack: Annotated[
        Path | None,
        typer.Option(
            help="niah, ruler: the text file in which needles are hidden.",
            show_default="a story that kvsearch brings along",
            rich_help_panel=PANEL,
        ),
    ] = None
    squad: Annotated[
        Path | None,
        typer.Option(
            help="ruler:qa_1: questions, a JSON file in SQuAD's format.", show_default=False, rich_help_panel=PANEL
        ),
    ] = None
    hotpot: Annotated[
        Path | None,
        typer.Option(
            help="ruler:qa_2: questions, a JSON file in HotpotQA's format.", show_default=False, rich_help_panel=PANEL
        ),
    ] = None
    depths: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="niah: where the needle is, in percent of the context.",
            show_default="ten even steps from 0 to 100",
            rich_help_panel=PANEL,
        ),
    ] = None
    shots: Annotated[
        int | None, typer.Option(help="gsm8k: how many worked examples.", show_default="4", rich_help_panel=PANEL)
    ] = None
    shots_from: Annotated[
        str | None,
        typer.Option(
            help="gsm8k: training rows to take them from, as --data.",
            show_default="kvsearch's own",
            rich_help_panel=PANEL,
        ),
    ] = None
    metric: Annotated[
        str | None,
        typer.Option(
            help="gsm8k: gsm8k or gsm8k_official; niah: niah_recall, niah_recall_lava, niah_rouge1 or another.",
            show_default="gsm8k, niah_recall",
            rich_help_panel=PANEL,
        ),
    ] = None

    def options(self, length: str | None, split: str | None = None) -> TaskOptions:
        """What was typed as `TaskOptions`; UsageError for lengths or depths that are no whole numbers."""
        from kvsearch.tasks.catalog import TaskOptions

        numbers = {"lengths": whole_numbers("--length", length), "depths": whole_numbers("--depths", self.depths)}
        return TaskOptions(split=split, **{**asdict(self), **numbers})


def whole_numbers(flag: str, typed: str | None) -> tuple[int, ...] | None:
    """The numbers of an option that takes several; UsageError, with its name, if there is anything else in it."""
    try:
        return None if typed is None else tuple(map(int, typed.split(",")))
    except ValueError as error:
        raise UsageError(f"{flag} takes whole numbers with commas between them, got {typed!r}") from error
