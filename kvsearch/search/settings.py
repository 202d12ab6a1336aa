"""What a search is to do: everything that decides its result, checked as a whole."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from kvsearch.naming import suggest
from kvsearch.plan.fields import Entries, Record, Text, refuse
from kvsearch.plan.protocol import QUESTION_AGNOSTIC, Protocol
from kvsearch.search.optimisers import optimiser_names
from kvsearch.search.optimisers.cma import FEWEST

SpaceName = Literal["groups", "layers", "heads", "basis"]
ObjectiveName = Literal["nll", "kl", "metric"]
WITH_POPULATION = ("cma", "random")  # optimisers whose generations may have any size


class SearchLimits(Record):
    """Where a search stops, whichever comes first; None: it does not. `evaluations` are of different candidates."""

    evaluations: Entries | None = None
    seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
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

    `minibatch` is how many samples a generation sees (None: all); every candidate of it sees the same, and its best one
    is then measured on all. `finalists` is how many of the best are judged by the metric on the selection split. `job`
    is how many candidates are evaluated together at most, whoever evaluates them.
    """

    budget: Entries
    space: SpaceName = "groups"
    group_size: int = Field(default=8, ge=1)
    optimiser: Text = "cma"
    objective: ObjectiveName = "nll"
    generations: int = Field(default=10, ge=1)
    population: int | None = Field(default=None, ge=2)
    sigma: float = Field(default=0.3, gt=0, allow_inf_nan=False)
    parity: bool = False
    lam: float = Field(default=0.3, ge=0)
    gamma: float = Field(default=0.2, gt=0, le=1)
    protocol: Protocol = QUESTION_AGNOSTIC
    minibatch: Entries | None = None
    finalists: int = Field(default=8, ge=1)
    job: int = Field(default=4, ge=1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _fits_together(self) -> EvolveSettings:
        problems: list[tuple[tuple[str | int, ...], str]] = []
        if self.parity and self.space != "groups":
            problems.append((("parity",), f"is the paper's procedure, which searches groups, not {self.space}"))
        if self.optimiser not in optimiser_names():
            problems.append(
                (("optimiser",), f"{self.optimiser!r} is unknown{suggest(self.optimiser, optimiser_names())}")
            )
        elif self.optimiser == "golden" and (self.space != "groups" or self.group_size > 1):
            problems.append((("optimiser",), "golden searches one dimension: it needs space groups and group_size 1"))
        if self.population is not None and self.optimiser not in WITH_POPULATION:
            problems.append((("population",), f"{self.optimiser} has no population: leave it out"))
        elif self.population is not None and self.optimiser == "cma" and self.population < FEWEST:
            problems.append((("population",), f"cma needs {FEWEST} or more, got {self.population}"))
        refuse(problems)
        return self

    def as_json(self) -> dict[str, Any]:
        """For the configuration of a run."""
        return self.model_dump(mode="json")
