"""What to calibrate: defaults, then a recipe file, then what the user typed. All problems show before a model loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvsearch.calibrate.options import Aggregate, Group, LukvOptions, Normalization
from kvsearch.errors import UsageError
from kvsearch.naming import suggest
from kvsearch.plan.fields import ScalarField
from kvsearch.plan.files import read_bytes
from kvsearch.plan.parsing import describe_validation_error
from kvsearch.policies import Policy, create_policy, policy_class
from kvsearch.resources import resource

# LU-KV's protection (App. E): four sinks; 32 recent tokens under SnapKV, one under policies that score every key
DEFAULTS: dict[str, dict[str, Any]] = {
    "snapkv": {"sinks": 4},
    "keydiff": {"sinks": 4, "window": 1},
    "expected_attention": {"sinks": 4, "window": 1, "epsilon": 0.02},
}
UNRANKED = ("full",)
CHOICES = {"method": ("lukv",), "normalization": Normalization.__args__, "aggregate": Aggregate.__args__}  # type: ignore[attr-defined]


class CalibrationRecipe(BaseModel):
    """A calibration as a recipe file states it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["lukv"] = "lukv"
    policy: str = "snapkv"
    params: dict[str, ScalarField] = Field(default_factory=dict)
    normalization: Normalization = "effect"
    aggregate: Aggregate = "ratios"
    group: Group = "sum"
    gap: bool = True
    minimum: float = Field(default=0.01, ge=0, lt=1)
    answer_tokens: int = Field(default=128, ge=1)

    def make_policy(self) -> Policy:
        """The policy with LU-KV's protected entries, unless `params` differ; UsageError if it cannot be calibrated."""
        if self.policy in UNRANKED:
            raise UsageError(f"policy {self.policy!r} evicts nothing, so it has no budgets to calibrate")
        policy_class(self.policy)
        return create_policy(self.policy, {**DEFAULTS.get(self.policy, {}), **self.params})

    def options(self, seed: int) -> LukvOptions:
        """The settings of the calibration."""
        return LukvOptions(**self.model_dump(exclude={"method", "policy", "params"}), seed=seed)


def resolve_recipe(
    path: Path | None, typed: Mapping[str, Any], settings: Sequence[str], no_gap: bool = False
) -> CalibrationRecipe:
    """Merge defaults, the recipe file, `--set key=value` and options the user typed (None: not typed), in this order.

    Raises:
        UsageError: an unreadable file, or settings that do not exist; all of them in one message.
    """
    merged = _read(path) if path is not None else {}
    given = {key: value for key, value in typed.items() if value is not None}
    for key, value in given.items():
        if key in CHOICES and value not in CHOICES[key]:
            raise UsageError(f"unknown {key} {value!r}{suggest(str(value), CHOICES[key])}")
    own = merged.get("policy", CalibrationRecipe.model_fields["policy"].default)
    if given.get("policy", own) != own:
        merged.pop("params", None)  # they belong to the recipe's own policy
    merged |= given | ({"gap": False} if no_gap else {})
    set_here, params = dict(parse_setting(item) for item in settings), merged.get("params", {})
    if set_here and isinstance(params, dict):
        merged["params"] = {**params, **set_here}
    try:
        return CalibrationRecipe.model_validate(merged)
    except ValidationError as error:
        raise UsageError(describe_validation_error(error, str(path or "the calibration settings"))) from error


def parse_setting(text: str) -> tuple[str, bool | int | float | str]:
    """Split "key=value" and read the value as true/false, a number, or a word."""
    key, found, value = text.partition("=")
    if not found or not key.strip():
        raise UsageError(f"--set {text!r} is not of the form key=value")
    value = value.strip()
    if value.lower() in ("true", "false"):
        return key.strip(), value.lower() == "true"
    for read in (int, float):
        try:
            return key.strip(), read(value)
        except ValueError:
            continue
    return key.strip(), value


def recipe_path(name: str) -> Path:
    """The file of that name or, for a bare name such as lukv-keydiff, the recipe that is shipped."""
    path = Path(name)
    if path.suffix or path.exists():
        return path
    shipped = sorted(resource("recipes").glob("*.yaml"))
    for candidate in shipped:
        if candidate.stem == name:
            return candidate
    raise UsageError(f"unknown recipe {name!r}{suggest(name, [candidate.stem for candidate in shipped])}")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(read_bytes(path).decode("utf-8", "replace"))
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a recipe: it should be a mapping such as `policy: snapkv`")
    return content
