"""The calibration methods and their options, as a recipe file states them: one model per method."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from kvsearch.budgets.adakv import AdaKVAllocation
from kvsearch.budgets.cake import CAKEAllocation
from kvsearch.budgets.dynamic import Allocation, Heads, Layers
from kvsearch.budgets.lava import LAVaAllocation
from kvsearch.calibration.base import Flag, Number, Progress, Recipe, Whole
from kvsearch.calibration.options import (
    ANSWER_TOKENS,
    Aggregate,
    CakeOptions,
    DynamicOptions,
    Exponents,
    Group,
    LukvOptions,
    Normalization,
)
from kvsearch.calibration.polykv.recipe import PolykvRecipe
from kvsearch.plan.fields import refuse
from kvsearch.plan.protocol import QUESTION_AGNOSTIC, Protocol
from kvsearch.policies import Policy

if TYPE_CHECKING:
    from kvsearch.calibration.data import CalibrationData
    from kvsearch.models.loading import LoadedModel
    from kvsearch.plan import Profile


class LukvRecipe(Recipe):
    """LU-KV; see `LukvOptions`."""

    unit: ClassVar[str] = "questions"
    # App. E: four sinks; 32 recent tokens under SnapKV, one under policies that score every key
    protection: ClassVar[dict[str, dict[str, Any]]] = {
        "snapkv": {"sinks": 4},
        "keydiff": {"sinks": 4, "window": 1},
        "expected_attention": {"sinks": 4, "window": 1, "epsilon": 0.02},
    }

    method: Literal["lukv"] = "lukv"
    policy: str = "snapkv"
    normalization: Normalization = "effect"
    aggregate: Aggregate = "ratios"
    group: Group = "sum"
    gap: bool = True
    minimum: float = Field(default=0.01, ge=0, lt=1)
    answer_tokens: int = Field(default=ANSWER_TOKENS, ge=1)

    def scope(self, data: CalibrationData) -> str:
        return f"{data.questions} questions"

    def options(self, seed: int) -> LukvOptions:
        """The settings of the calibration."""
        return LukvOptions(**self.model_dump(include=set(self.option_names())), seed=seed)

    def calibrate(
        self, loaded: LoadedModel, data: CalibrationData, policy: Policy, seed: int, progress: Progress | None = None
    ) -> Profile:
        """See `calibrate_lukv`."""
        from kvsearch.calibration import lukv

        return lukv.calibrate_lukv(loaded, data, policy, self.options(seed), progress)


class DynamicRecipe(Recipe):
    """What the methods have in common that decide budgets anew for every prompt; see `DynamicOptions`."""

    unit: ClassVar[str] = "prompts"

    protocol: Protocol = QUESTION_AGNOSTIC
    minimum: Number = Field(default=0.0, ge=0, lt=1)

    @abstractmethod
    def make_allocation(self) -> Allocation:
        """The rule that decides; UsageError if its options contradict each other."""

    def make_policy(self) -> Policy:
        """See `Recipe.make_policy`; UsageError if the entries of the policy cannot be shared by the method, too."""
        policy = super().make_policy()
        self.make_allocation().check(policy, f"method {self.method}")
        return policy

    def scope(self, data: CalibrationData) -> str:
        if self.protocol == QUESTION_AGNOSTIC:
            return f"{len(data.contexts)} contexts without their questions"
        return f"{data.questions} contexts with a question"

    def options(self, seed: int) -> DynamicOptions:
        """The settings of the calibration."""
        return DynamicOptions(self.protocol, self.minimum, seed)

    def calibrate(
        self, loaded: LoadedModel, data: CalibrationData, policy: Policy, seed: int, progress: Progress | None = None
    ) -> Profile:
        """See `calibrate_dynamic`."""
        from kvsearch.calibration import dynamic

        return dynamic.calibrate_dynamic(loaded, data, policy, self.make_allocation(), self.options(seed), progress)


class LavaRecipe(DynamicRecipe):
    """LAVa: layers and heads, by the entropy of a layer and where its highest scores are."""

    method: Literal["lava"] = "lava"
    policy: str = "lava"
    floor_share: Number = Field(default=LAVaAllocation.floor_share, ge=0, le=1)
    layers: Layers = LAVaAllocation.layers
    heads: Heads = LAVaAllocation.heads

    def make_allocation(self) -> LAVaAllocation:
        return LAVaAllocation(self.floor_share, self.heads, self.layers)


class AdakvRecipe(DynamicRecipe):
    """AdaKV: the heads of a layer, by where its highest scores are."""

    method: Literal["adakv"] = "adakv"
    policy: str = "snapkv"
    floor_share: Number = Field(default=AdaKVAllocation.floor_share, ge=0, le=1)
    variant: Literal["exact", "kvpress"] = "exact"
    normalize: Flag = AdaKVAllocation.normalize

    def make_allocation(self) -> AdaKVAllocation:
        return AdaKVAllocation(self.floor_share, self.variant, self.normalize)


class CakeRecipe(DynamicRecipe):
    """CAKE: layers, by how dispersed their attention is and how much it shifts; see `CakeOptions`."""

    # which way of coming by the exponents reads an option
    sources: ClassVar[dict[str, Exponents]] = {
        "tau1": "fixed", "tau2": "fixed", "tuned_for": "auto", "fit_ratio": "fit", "answer_tokens": "fit",
    }  # fmt: skip

    method: Literal["cake"] = "cake"
    policy: str = "cake"
    exponents: Exponents = "auto"
    tau1: Number = Field(default=CAKEAllocation.tau1, gt=0, allow_inf_nan=False)
    tau2: Number = Field(default=CAKEAllocation.tau2, gt=0, allow_inf_nan=False)
    window: Whole = Field(default=CAKEAllocation.window, ge=0)
    tuned_for: Whole = Field(default=CakeOptions.tuned_for, ge=1)
    fit_ratio: Number = Field(default=CakeOptions.fit_ratio, gt=0, lt=1)
    answer_tokens: Whole = Field(default=ANSWER_TOKENS, ge=1)

    @model_validator(mode="after")
    def _all_options_are_read(self) -> CakeRecipe:
        refuse(
            ((name,), f"is read with exponents {source} only, and they are {self.exponents}")
            for name, source in self.sources.items()
            if source != self.exponents and getattr(self, name) != type(self).model_fields[name].default
        )
        return self

    def make_allocation(self) -> CAKEAllocation:
        return CAKEAllocation(self.tau1, self.tau2, self.window)

    def cake_options(self) -> CakeOptions:
        """Where the exponents come from."""
        names = set(self.option_names()) - set(DynamicRecipe.option_names())
        return CakeOptions(**self.model_dump(include=names))

    def calibrate(
        self, loaded: LoadedModel, data: CalibrationData, policy: Policy, seed: int, progress: Progress | None = None
    ) -> Profile:
        """See `calibrate_cake`."""
        from kvsearch.calibration import cake_exponents as exponents

        return exponents.calibrate_cake(loaded, data, policy, self.cake_options(), self.options(seed), progress)


CalibrationRecipe = LukvRecipe | LavaRecipe | CakeRecipe | AdakvRecipe | PolykvRecipe
RECIPES: dict[str, type[CalibrationRecipe]] = {
    "lukv": LukvRecipe, "lava": LavaRecipe, "cake": CakeRecipe, "adakv": AdakvRecipe, "polykv": PolykvRecipe,
}  # fmt: skip
