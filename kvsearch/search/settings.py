"""How to search: everything that decides the result but sizes, questions and start plans, checked as a whole."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from kvsearch.core.fields import Record, refuse
from kvsearch.plan import PhaseNames
from kvsearch.plan.schema import QUESTION_AGNOSTIC, Protocol
from kvsearch.tasks.base import Answers

SpaceName = Literal["groups", "layers", "heads", "joint"]
ObjectiveName = Literal["nll", "metric"]
MIN_POPULATION = 4  # points of a generation that the update of the covariance of CMA-ES works with
MAX_POOL = 1024  # candidates of a search that are worth a second look, beside the start plans


class EvolveSettings(Record):
    """Settings of EvolKV (arXiv 2509.08315, Algorithm 1), with choices the paper leaves open.

    c is the average budget of a kv head. Candidates hold c entries per kv head exactly. With `parity` they may hold
    what they like, as in the paper: fitness has the term 1 + lam * CacheScore of the group's budgets (Eq. 1 and 2), the
    best fitness is carried from group to group, and the result is completed to the total at the end.

    Args:
        space: what varies: groups of `group_size` layers one after the other, all layers at once, multipliers of heads
            around the first start plan, or with "joint" also the policy of every layer.
        phases: the phases whose budgets are searched.
        group_size: layers of a group; a model of fewer has one group, unless this is set.
        objective: what candidates are judged by in the search, the loss of teacher-forced answers or the task's metric.
        answers: what is teacher-forced, the model's own right replies or the given answers.
        generations: of each group.
        population: of each generation; None: 4 + 3 ln dimension.
        sigma: the first step, in units of the budget.
        parity: the paper's literal choices, whose cache term has the weight `lam` and the penalty `gamma`.
        protocol: whether a context is compressed with its question.
        hard_below: search on questions alone that score below so many percent under even budgets; `hard_most` of them.
        finalists: candidates that are judged by the metric at the end.
        seed: of the optimiser.
    """

    space: SpaceName = "groups"
    phases: PhaseNames = "prefill"
    group_size: int = Field(default=8, ge=1)
    objective: ObjectiveName = "nll"
    answers: Answers = "own"
    generations: int = Field(default=10, ge=1)
    population: int | None = Field(default=None, ge=MIN_POPULATION)
    sigma: float = Field(default=0.3, gt=0, allow_inf_nan=False)
    parity: bool = False
    lam: float = Field(default=0.3, ge=0, allow_inf_nan=False)
    gamma: float = Field(default=0.2, gt=0, le=1)
    protocol: Protocol = QUESTION_AGNOSTIC
    hard_below: float | None = Field(default=None, gt=0, le=100)
    hard_most: int | None = Field(default=None, ge=2)
    finalists: int = Field(default=8, ge=1, le=MAX_POOL)
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
