"""Plans, profiles, weights of policies, and compressed caches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path

from kvsearch.jobs.export import export, export_to
from kvsearch.plan import canonical_json, load_plan, load_profile, save_plan
from kvsearch.plan.profile import read_profile
from kvsearch.plan.profile_arrays import EVICTED_RATIO
from kvsearch.plan.yaml import plan_to_yaml
from kvsearch.policies import create_policy
from kvsearch.policies.fitted import parse_policy
from kvsearch.runtime.store.cache_file import read_cache, read_header
from kvsearch.strategies.from_yaml import plan_from_yaml
from tests.plan.builders import make_plan
from tests.robustness.forms import Json, Safetensors, Yaml, sealed_cache
from tests.robustness.kinds.kind import Bases, Kind, same, show, taken
from tests.robustness.valid import plans, profiles


def _plan(path: Path) -> None:
    show(path)
    plan = load_plan(path)
    with taken("the plan that was written"):
        save_plan(plan, path.with_name("again.json"), overwrite=True)
        same(load_plan(path.with_name("again.json")), plan, "written and read again")
        same(plan_from_yaml(plan_to_yaml(plan), "again"), plan, "as YAML and back")


def _strategy(path: Path) -> None:
    show(path)
    plan = plan_from_yaml(path.read_text(), str(path))
    with taken("the strategy that was written"):
        same(plan_from_yaml(plan_to_yaml(plan), "again"), plan, "written and read again")


def _profile(path: Path) -> None:
    show(path)
    profile = load_profile(path)
    with taken("the profile that was written"):
        again = read_profile(profile.to_bytes(), "again")
        same(again.metadata, profile.metadata, "metadata, written and read again")
        same(again.to_bytes(), profile.to_bytes(), "written twice")
        if EVICTED_RATIO in profile.arrays:
            assert ((profile.local_ratios(0.8) >= 0) & (profile.local_ratios(0.005) <= 1)).all()


def _export(path: Path) -> None:
    _profile(path)
    plan = export(profile=path, ratio=0.8, output=path.with_name("plan.json"), force=True, allow_harmful=True)
    assert plan.total >= 1


def _statistics(path: Path) -> None:
    _profile(path)
    export_to(profile=path, to="kvpress-ea", output=path.with_name("out"), force=True)


def _fitted(name: str, path: Path) -> None:
    found, params = parse_policy(f"{name}={path.parent}")
    policy = create_policy(found, params)
    with taken("the policy of these weights"):
        assert policy.needs() is not None
        same(create_policy(found, policy.parameters()), policy, "made of its parameters")


def _ranking(path: Path) -> None:
    _profile(path)
    _fitted("probe", path)


def _weights_of_plan(path: Path) -> None:
    _plan(path.with_name("plan.json"))


def _cache(path: Path) -> None:
    read_header(path)
    show(path)
    read_cache(path)
    plans.load(path)


def _plan_beside(name: str, weights: Bases) -> dict[str, bytes]:
    """A plan whose policy has weights, which lie beside it."""
    digest = sha256(weights()[0]).hexdigest()
    policy = {"name": name, "params": {"weights": digest}}
    layers = [{"policy": policy, "budget": [20, 20]}] * 2
    return {"plan.json": canonical_json(make_plan([[20, 20]] * 2, prefill={"layers": layers}))}


def _weights_name() -> str:
    return f"probe-{sha256(profiles.rankings()[1]).hexdigest()[:12]}.safetensors"


def kinds() -> Iterator[Kind]:
    yield Kind("plan", "plan.json", plans.plan_files, Json(), _plan)
    yield Kind("strategy", "strategy.yaml", plans.plan_texts, Yaml(), _strategy)
    profile = "profile.safetensors"
    yield Kind("profile-table", profile, profiles.table_profiles, Safetensors(), _export)
    yield Kind("profile-signals", profile, profiles.signal_profiles, Safetensors(), _export)
    yield Kind("profile-queries", profile, profiles.query_profiles, Safetensors(), _statistics)
    yield Kind("profile-ranking", profile, profiles.compared_rankings, Safetensors(), _ranking)
    yield Kind("weights-probe", profile, profiles.rankings, Safetensors(), partial(_fitted, "probe"))
    yield Kind("weights-query_bank", profile, profiles.query_banks, Safetensors(), partial(_fitted, "query_bank"))
    zap, zap_file = partial(_fitted, "kvzap"), "model.safetensors"
    zapped = {zap_file: profiles.zap_files()[0]}
    yield Kind("weights-kvzap", zap_file, profiles.zap_files, Safetensors(None), zap)
    yield Kind("kvzap-config", "config.json", profiles.zap_config, Json(), zap, lambda: zapped)
    weights = partial(profiles.rankings, 1)
    beside = partial(_plan_beside, "probe", weights)
    yield Kind("weights-of-plan", _weights_name(), weights, Safetensors(), _weights_of_plan, beside)
    yield Kind("cache", "cache.kv", plans.caches, Safetensors(sealed=sealed_cache), _cache)
