"""How to search: everything that decides the result but sizes, questions and start plans, checked as a whole."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from kvsearch.calibration.options import ANSWERS_OPTION
from kvsearch.config.options import option
from kvsearch.core.fields import Record, refuse
from kvsearch.plan import PhaseNames
from kvsearch.plan.schema import QUESTION_AGNOSTIC, Protocol
from kvsearch.tasks.base import Answers

SpaceName = Literal["groups", "layers", "heads", "joint"]
ObjectiveName = Literal["nll", "metric"]
MIN_POPULATION = 4  # points of a generation that the update of the covariance of CMA-ES works with
MAX_POOL = 1024  # candidates of a search that are worth a second look, beside the start plans
SEARCH_PANEL = "What is searched"  # headings of the help


class EvolveSettings(Record):
    """EvolKV (arXiv 2509.08315, Algorithm 1), with what the paper leaves open; c is the average budget of a kv head.

    Candidates hold c entries per kv head exactly. With `parity` they may hold what they like, as in the paper: fitness
    has the term 1 + lam * CacheScore of the group's budgets (Eq. 1 and 2), the best fitness is carried from group to
    group, and the result is completed to the total at the end.
    """

    panel: ClassVar[str] = SEARCH_PANEL

    space: SpaceName = option(
        "groups",
        "groups: one group of layers after the other; layers: all at once; heads: multipliers around the first "
        "--start; joint: the policy of every layer, of those of the --start plans and --policy, and multipliers "
        "around the best start.",
    )
    phases: PhaseNames = option(
        "prefill",
        "When to evict: prefill, decode or both, each phase with the budget as its size. Prefill candidates share "
        "one reading of every prompt; with decode each is run whole, exact and slower.",
    )
    group_size: int = option(8, "Layers of a group.", shown="8, or all", ge=1)
    objective: ObjectiveName = option(
        "nll",
        "What the search lowers or raises: nll of teacher-forced answers (cheap), or metric, the task's own of "
        "free replies. The best are judged by the metric in any case.",
    )
    answers: Answers = option("own", ANSWERS_OPTION)
    generations: int = option(10, "Of each group.", ge=1)
    population: int | None = option(None, "Of each generation.", shown="4 + 3 ln dimension", ge=MIN_POPULATION)
    sigma: float = option(0.3, "First step, in units of the budget.", gt=0, allow_inf_nan=False)
    parity: bool = option(False, "The paper's literal choices (soft total, cache term).")
    lam: float = option(
        0.3, "With --parity: weight of the cache term (Eq. 1).", flag="--lambda", ge=0, allow_inf_nan=False
    )
    gamma: float = option(0.2, "With --parity: penalty for unused budget in the cache term (Eq. 2).", gt=0, le=1)
    protocol: Protocol = QUESTION_AGNOSTIC
    hard_below: float | None = option(
        None,
        "Search only on questions that the full cache answers right and that score below so many percent under "
        "even budgets (the paper's needles: 60).",
        metavar="PERCENT",
        shown="all questions",
        gt=0,
        le=100,
    )
    hard_most: int | None = option(
        None, "With --hard-below: at most so many of them (the paper's needles: 35).", shown="all", ge=2
    )
    finalists: int = option(8, "Candidates that are judged by the metric at the end.", ge=1, le=MAX_POOL)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _fits_together(self) -> EvolveSettings:
        problems: list[tuple[tuple[str | int, ...], str]] = []
        if self.parity and self.space != "groups":
            problems.append((("parity",), f"is the paper's procedure, which searches groups, not {self.space}"))
        defaults = {name: EvolveSettings.model_fields[name].default for name in ("lam", "gamma")}
        stated = [name for name, value in defaults.items() if not self.parity and getattr(self, name) != value]
        problems += [((name,), "is of the paper's cache term: give --parity, too") for name in stated]
        if self.hard_most is not None and self.hard_below is None:
            problems.append((("hard_most",), "is how many of the hard questions: say which are with --hard-below"))
        if self.space == "joint" and self.phases != "prefill":
            problems.append((("phases",), "space joint is of the prefill phase, whose prompts all policies share"))
        refuse(problems)
        return self

    def as_json(self) -> dict[str, Any]:
        """Return the settings for the configuration of a run and the provenance of a plan."""
        return self.model_dump(mode="json", include=set(EvolveSettings.model_fields), by_alias=True)
