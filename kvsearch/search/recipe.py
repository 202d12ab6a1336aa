"""What to search: defaults, then a recipe file, then what the user typed. All problems show before a model loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from kvsearch.errors import UsageError
from kvsearch.plan.fields import Entries, Record, ScalarField, Text, refuse
from kvsearch.plan.parsing import describe_validation_error
from kvsearch.plan.protocol import QUESTION_AGNOSTIC, Protocol
from kvsearch.recipe_files import find_recipe, read_recipe
from kvsearch.search.settings import EvolveSettings, ObjectiveName, SpaceName

FOLDER, EXAMPLE = "recipes/evolve", "budget: 128"


class EvolveRecipe(Record):
    """The options of `kvsearch evolve` that decide its result; see `EvolveSettings` for those of the search.

    `budgets` in place of `budget` searches several sizes. `policy` None is that of the first start plan, or snapkv.
    `samples` are contexts of every task in each split, `length` is theirs in tokens where the task has a choice.
    """

    budget: Entries | None = None
    budgets: tuple[Entries, ...] | None = None
    policy: Text | None = None
    params: dict[str, ScalarField] = Field(default_factory=dict)
    tasks: Text = "synthetic"
    length: Text | None = None
    samples: Entries = 10
    max_length: Entries | None = None
    space: SpaceName = "groups"
    group_size: Entries = 8
    optimiser: Text = "cma"
    objective: ObjectiveName = "nll"
    generations: Entries = 10
    population: Entries | None = None
    sigma: float = 0.3
    parity: bool = False
    lam: float = 0.3
    gamma: float = 0.2
    protocol: Protocol = QUESTION_AGNOSTIC
    minibatch: Entries | None = None
    finalists: Entries = 8
    job: Entries = 4
    method: Literal["evolkv"] = "evolkv"

    @model_validator(mode="after")
    def _one_size_or_several(self) -> EvolveRecipe:
        if self.budget is not None and self.budgets is not None:
            refuse([(("budgets",), "is in place of budget: give one of them")])
        return self

    def settings(self, seed: int) -> EvolveSettings:
        """Of the search, at the only or the smallest budget.

        Raises:
            UsageError: no budget, or settings that do not go together.
        """
        sizes = self.budgets or (() if self.budget is None else (self.budget,))
        if not sizes:
            raise UsageError("how many entries may a kv head keep on average? Give --budget, or several with --budgets")
        stated = "group_size" in self.model_fields_set
        left_out = {"budget"} if stated else {"budget", "group_size"}
        own = self.model_dump(include=set(EvolveSettings.model_fields) - left_out)
        try:
            return EvolveSettings.model_validate({**own, "budget": min(sizes), "seed": seed})
        except ValidationError as error:
            raise UsageError(describe_validation_error(error, "the search")) from error


def resolve_recipe(name: str | None, typed: Mapping[str, Any], params: Mapping[str, Any]) -> EvolveRecipe:
    """Merge defaults, the recipe and what the user typed, in this order.

    Args:
        name: a YAML file, a recipe that is shipped, or None.
        typed: options by name; None: not typed.
        params: policy parameters; they are added to those of the recipe, unless another policy is typed.

    Raises:
        UsageError: an unreadable file, or settings that do not exist; those of the file all in one message.
    """
    merged = {} if name is None else read_recipe(recipe_path(name), EXAMPLE)
    given = {key: value for key, value in typed.items() if value is not None}
    for size, other in (("budget", "budgets"), ("budgets", "budget")):
        if size in given and other not in given:
            merged.pop(other, None)
    if given.get("policy", merged.get("policy")) != merged.get("policy"):
        merged.pop("params", None)  # they belong to the recipe's own policy
    own = merged.get("params", {})
    if params and isinstance(own, dict):
        merged["params"] = {**own, **params}
    try:
        return EvolveRecipe.model_validate({**merged, **given})
    except ValidationError as error:
        raise UsageError(describe_validation_error(error, name or "the search")) from error


def recipe_path(name: str) -> Path:
    """The file of that name or, for a bare name such as paper-8b, the recipe that is shipped."""
    return find_recipe(name, FOLDER)
