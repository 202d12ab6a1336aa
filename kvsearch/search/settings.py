"""What a search is to do: everything that decides its result, checked as a whole."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from kvsearch.evaluate.protocol import QUESTION_AGNOSTIC, Protocol
from kvsearch.plan.fields import Entries, Record, Text, refuse

SpaceName = Literal["groups", "layers", "heads", "basis"]
ObjectiveName = Literal["nll", "kl", "metric"]
JUDGED_BY_METRIC = ("nll", "kl")  # cheap objectives, whose best are judged by the task's metric before one is chosen


class Limits(Record):
    """Where a search stops, whichever comes first; None: it does not. `evaluations` are of different candidates."""

    evaluations: Entries | None = None
    seconds: float | None = Field(default=None, gt=0)
    tokens: Entries | None = None


class EvolveSettings(Record):
    """EvolKV (arXiv 2509.08315, Algorithm 1), with what the paper leaves open.

    `budget` is c, the average entries per kv head. `space` is what is varied: the layers of one group of `group_size`
    consecutive layers after the other ("groups", Algorithm 1), all layers at once, multipliers of each group of layers
    around the first start plan with its heads ("heads"), or the main directions in which the start plans differ
    ("basis"). `generations` are per group; `population` None is 4 + floor(3 ln dimension). `sigma` is in units of c.

    Candidates hold budget entries exactly. With `parity` they may hold what they like, as in the paper: fitness has the
    term 1 + lam * CacheScore of the group's budgets (Eq. 1 and 2), the best fitness is carried from group to group, and
    the result is completed to the total at the end.

    `minibatch` is how many samples a generation sees (None: all); every candidate of it sees the same. `finalists` is
    how many of the best are judged by the metric on the selection split. `job` is how many candidates are evaluated
    together, whoever evaluates them.
    """

    budget: Entries
    space: SpaceName = "groups"
    group_size: int = Field(default=8, ge=1)
    optimiser: Text = "cma"
    objective: ObjectiveName = "nll"
    generations: int = Field(default=10, ge=1)
    population: int | None = Field(default=None, ge=2)
    sigma: float = Field(default=0.3, gt=0)
    parity: bool = False
    lam: float = Field(default=0.3, ge=0)
    gamma: float = Field(default=0.2, gt=0, le=1)
    protocol: Protocol = QUESTION_AGNOSTIC
    minibatch: Entries | None = None
    finalists: int = Field(default=8, ge=1)
    job: int = Field(default=8, ge=1)
    seed: int = Field(default=0, ge=0)

    @property
    def stages_of(self) -> str:
        """What is searched, for people."""
        return f"groups of {self.group_size} layers" if self.space == "groups" else self.space

    @model_validator(mode="after")
    def _fits_together(self) -> EvolveSettings:
        problems: list[tuple[tuple[str | int, ...], str]] = []
        if self.parity and self.space != "groups":
            problems.append((("parity",), f"is the paper's procedure, which searches groups, not {self.space}"))
        if self.optimiser == "golden" and self.space == "layers":
            problems.append((("optimiser",), "golden searches one dimension: it needs space groups and group_size 1"))
        refuse(problems)
        return self

    def as_json(self) -> dict[str, Any]:
        """For the configuration of a run."""
        return self.model_dump(mode="json")
