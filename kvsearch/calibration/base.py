"""What the recipes of all calibration methods have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, Field

from kvsearch.errors import UsageError
from kvsearch.plan.fields import ScalarField
from kvsearch.policies import Policy, create_policy, policy_class

if TYPE_CHECKING:
    from kvsearch.calibration.data import CalibrationData
    from kvsearch.models.loading import LoadedModel
    from kvsearch.plan import Profile

Progress = Callable[[int, int], None]
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True)]

UNRANKED = ("full",)


class Recipe(BaseModel, ABC):
    """What all methods have: a policy, and its parameters where they differ from the method's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    unit: ClassVar[str]  # what is counted while it runs
    own_params: ClassVar[bool] = True  # whether `params` belong to `policy`, and not to all policies that are measured
    protection: ClassVar[dict[str, dict[str, Any]]] = {}  # by policy, where the method differs from it

    method: str
    policy: str
    params: dict[str, ScalarField] = Field(default_factory=dict)

    @classmethod
    def option_names(cls) -> list[str]:
        """The options that belong to the method alone."""
        return [name for name in cls.model_fields if name not in Recipe.model_fields]

    @classmethod
    def choices(cls, name: str) -> tuple[Any, ...]:
        """The values an option must be one of; nothing if it takes others."""
        hint = cls.model_fields[name].annotation
        return get_args(hint) if all(isinstance(value, str) for value in get_args(hint)) else ()

    def make_policy(self) -> Policy:
        """The policy with the method's protected entries, unless `params` differ.

        Raises:
            UsageError: an unknown policy or parameter, or one that cannot be calibrated.
        """
        if self.policy in UNRANKED:
            raise UsageError(f"policy {self.policy!r} evicts nothing, so it has no budgets to calibrate")
        policy_class(self.policy)
        return create_policy(self.policy, {**self.protection.get(self.policy, {}), **self.params})

    def policies(self) -> list[Policy]:
        """All policies that are measured, `make_policy` among them; UsageError as it raises them."""
        return [self.make_policy()]

    def resolved(self) -> dict[str, Any]:
        """Everything that decides what is measured, as a recipe file; UsageError as `make_policy`."""
        return {**self.model_dump(), "params": self.make_policy().parameters()}

    @abstractmethod
    def scope(self, data: CalibrationData) -> str:
        """What of `data` is measured, in words."""

    @abstractmethod
    def calibrate(
        self, loaded: LoadedModel, data: CalibrationData, policy: Policy, seed: int, progress: Progress | None = None
    ) -> Profile:
        """Run the method; UsageError and IncompatibleError as it raises them."""
