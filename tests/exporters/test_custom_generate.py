"""The folder that transformers runs in place of its own `generate`: replies of `attach`, with transformers alone."""

from __future__ import annotations

import builtins
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import kvsearch
from kvsearch.commands.export import write_files
from kvsearch.exporters import planned_generate
from kvsearch.exporters.base import ExportInputs
from kvsearch.exporters.folder import CustomGenerate
from kvsearch.models.architecture import describe
from kvsearch.models.fingerprint import compute_fingerprint
from kvsearch.plan import Plan
from kvsearch.plan.arithmetic import add_carry, compute_budgets
from kvsearch.plan.saved import save_plan
from kvsearch.policies import create_policy
from kvsearch.runtime.stock import CACHE
from tests.cli.conftest import invoke
from tests.combinations import first_value
from tests.families import TINY, build
from tests.plan.builders import make_plan, phase_dict

LENGTH, CONTEXT, NEW = 72, 60, 8
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("h2o", {"recent": 3, "sinks": 1}), ("streaming", {}), ("keydiff", {"sinks": 2, "window": 3}),
    ("snapkv", {"window": 8, "protect": 2, "pooling": "avg", "group": "max", "sinks": 2}),
    ("expected_attention", {"future": 16}),
]  # fmt: skip


def plan_of(model: Any, policy: str = "snapkv", params: dict[str, Any] | None = None, **changes: Any) -> Plan:
    """Uneven budgets for prompts of 60 tokens."""
    shape = describe(model)
    rng = random.Random(3)
    budgets = [
        [rng.randint(12, 40) for _ in range(shape.kv_heads)] if layer in shape.full_layers else None
        for layer in range(shape.layers)
    ]
    phase = phase_dict(budgets, {"name": policy, "params": {"window": 8} if params is None else params})
    known = {"prefill": phase, "length": 60, "floor": 1, "model": compute_fingerprint(model, "tiny").model_dump()}
    return make_plan(budgets, **{**known, **changes})


def folder_of(plan: Plan, path: Path) -> str:
    write_files(CustomGenerate().export(plan, ExportInputs()), path, force=False)
    return str(path)


def prompts() -> dict[str, Any]:
    """Two prompts, one of them padded."""
    ids = torch.randint(2, 97, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    return {"inputs": ids, "attention_mask": mask}


def replies(model: Any, folder: str, **settings: Any) -> Any:
    asked = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "custom_generate": folder}
    return model.generate(**{**prompts(), **asked, "trust_remote_code": True, **settings})


def require_equal(model: Any, plan: Plan, folder: str, *, whole: bool = False) -> None:
    """Tokens and logits are those of `attach`, for questions about a context, and for whole prompts."""
    for context in (CONTEXT, None) if whole else (CONTEXT,):
        detail = {"return_dict_in_generate": True, "output_logits": True}
        ours = replies(model, folder, context_length=context, **detail)
        asked = prompts()
        with kvsearch.attach(model, plan) as planned:
            if context is not None:
                asked[CACHE] = planned.read(asked["inputs"][:, :context], asked["attention_mask"][:, :context])
            theirs = planned.generate(**asked, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **detail)
        assert torch.equal(ours.sequences, theirs.sequences)
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=1e-3, rtol=1e-4)


@first_value(("policy", "params"), POLICIES)
def test_replies_are_those_of_attach(policy: str, params: dict[str, Any], tmp_path: Path) -> None:
    model = build("llama")
    before = model.config._attn_implementation
    plan = plan_of(model, policy, params, scaling="proportional")
    require_equal(model, plan, folder_of(plan, tmp_path / "made"), whole=True)
    assert model.config._attn_implementation == before
    full = model.generate(**prompts(), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    assert not torch.equal(replies(model, str(tmp_path / "made")), full)  # so something left


@pytest.mark.nightly
@pytest.mark.parametrize("family", [name for name in TINY if name in {*planned_generate.MODELS, "gemma3"} - {"llama"}])
def test_models_that_need_transformers_alone(family: str, tmp_path: Path) -> None:
    model = build(family)
    plan = plan_of(model, "expected_attention", {"window": 8}, scaling="fixed")
    assert planned_generate.needs_kvsearch(plan.model_dump(mode="json")) is None
    require_equal(model, plan, folder_of(plan, tmp_path / "made"))


def forbid_kvsearch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package be as if it were not installed."""
    real_import = builtins.__import__

    def without_kvsearch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "kvsearch":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_kvsearch)


def test_it_needs_no_kvsearch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a folder that was moved."""
    model = build("llama")
    plan = plan_of(model)
    folder_of(plan, tmp_path / "made")
    folder = shutil.move(tmp_path / "made", tmp_path / "moved")
    with kvsearch.attach(model, plan) as planned:
        theirs = planned.generate(**prompts(), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    forbid_kvsearch(monkeypatch)
    assert torch.equal(replies(model, str(folder)), theirs)


def test_a_model_that_lies_in_the_folder(tmp_path: Path) -> None:
    """`from_pretrained` puts the folder's code in the place of `generate`, which is then called without its name."""
    model = build("llama")
    folder = folder_of(plan_of(model), tmp_path / "made")
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = replies(model, folder, max_new_tokens=8)
    for _ in range(2):  # it is still there after the first call
        assert torch.equal(loaded.generate(**prompts(), **settings), expected)
    loaded.config.name_or_path = "elsewhere"
    with pytest.raises(ValueError, match=r"plan\.json lies is not known here: give generate the folder="):
        loaded.generate(**prompts(), **settings)
    assert torch.equal(loaded.generate(**prompts(), **settings, folder=folder), expected)


def run_by_kvsearch(model: Any) -> dict[str, Plan]:
    """Plans that this code hands on, by what is said of them."""
    plan = plan_of(model)
    assert plan.prefill is not None
    return {
        "it evicts while decoding": plan.model_copy(update={"decode": plan.prefill}),
        "adakv divides its budgets": plan_of(model, allocation={"name": "adakv", "params": {}}),
        "its entries carry what leaves": add_carry(plan, "match"),
        "policy tova": plan_of(model, "tova", {}),
    }


def test_other_plans_are_run_by_kvsearch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    plans = run_by_kvsearch(model)
    for number, (reason, plan) in enumerate(plans.items()):
        exported = CustomGenerate().export(plan, ExportInputs())
        assert not exported.losses
        assert exported.usage[1].startswith(f"needs the package kvsearch: {reason}")
        folder = folder_of(plan, tmp_path / str(number))
        if reason.startswith(("it evicts", "policy")):
            require_equal(model, plan, folder)
    quantised = folder_of(plan_of(model), tmp_path / "quantised")
    forbid_kvsearch(monkeypatch)
    with pytest.raises(
        ImportError, match=r"^this plan needs the package kvsearch \(it evicts while decoding\): pip ins"
    ):
        replies(model, str(tmp_path / "0"))
    model.is_quantized = True
    with pytest.raises(ImportError, match=r"kvsearch \(a model with quantised weights or adapters\)"):
        replies(model, quantised)


def test_a_plan_of_another_model_is_one_line(tmp_path: Path) -> None:
    model = build("llama")
    folder = folder_of(plan_of(model), tmp_path / "made")
    problem = "^the plan of this folder is for another model, 'tiny': "
    with pytest.raises(ValueError, match=problem + "model_type llama, here qwen3$"):
        replies(build("qwen3"), folder)
    with pytest.raises(ValueError, match=problem + "layers 4, here 3$"):
        replies(build("llama", num_hidden_layers=3), folder)
    other = build("llama")
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(ValueError, match=problem + r"weights \w{12}, here \w{12}$"):
        replies(other, folder)
    (tmp_path / "made" / "plan.json").write_text("{")
    with pytest.raises(ValueError, match=r"made/plan\.json is no plan that can be read \(JSON.*\): export it again$"):
        replies(model, folder)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens and the plan of this folder exclude each other"),
        ({"use_cache": False}, "brings its own cache: drop use_cache=False"),
        ({"context_length": LENGTH}, f"context_length={LENGTH}: give input_ids that have more tokens"),
        ({"context_length": 9, "num_beams": 2}, "context_length is for one reply"),
        ({"attention_mask": torch.ones(2, LENGTH).long().tril(LENGTH - 2)}, "pad batches on the left"),
    ],
)
def test_what_a_plan_cannot_honour_is_one_line(settings: dict[str, Any], problem: str, tmp_path: Path) -> None:
    model = build("llama")
    folder = folder_of(plan_of(model), tmp_path / "made")
    with pytest.raises(ValueError, match=problem) as caught:
        replies(model, folder, **settings)
    assert "\n" not in str(caught.value)
    assert model.config._attn_implementation == "sdpa"


@given(
    st.lists(st.lists(st.integers(1, 90), min_size=2, max_size=2) | st.none(), min_size=1, max_size=6).filter(any),
    st.integers(1, 400), st.booleans(), st.integers(0, 4),
)  # fmt: skip
def test_budgets_are_those_of_the_plan(budgets: list[Any], length: int, fixed: bool, floor: int) -> None:
    budgets = [None if row is None else [max(floor, entries) for entries in row] for row in budgets]
    plan = make_plan(budgets, length=90, floor=floor, scaling="fixed" if fixed else "proportional")
    found = planned_generate.compute_budgets(plan.model_dump(mode="json"), length)
    assert list(found.values()) == compute_budgets(plan, "prefill", length).tolist()
    assert list(found) == list(plan.planned_layers("prefill"))


def test_parameters_are_those_of_the_policies() -> None:
    for name, params in planned_generate.POLICY_DEFAULTS.items():
        policy = create_policy(name)
        assert {"refresh": 0, "protect": policy.recent_count, **policy.parameters()}.items() >= {
            **params, **({"protect": policy.recent_count} if "protect" in params else {})
        }.items()  # fmt: skip
        assert {**policy.parameters()}.keys() <= {*params, "refresh"}


def test_the_command_writes_it(tmp_path: Path) -> None:
    model = build("llama")
    plan = plan_of(model)
    save_plan(plan, tmp_path / "plan.json")
    code, out, _ = invoke(
        "export", tmp_path / "plan.json", "--to", "custom-generate", "-o", tmp_path / "made", "--json"
    )
    said = json.loads(out)
    assert (code, said["losses"]) == (0, [])
    assert said["usage"][1] == "needs torch and transformers alone"
    code_file = (tmp_path / "made" / "custom_generate" / "generate.py").read_text()
    assert code_file == Path(planned_generate.__file__).read_text()
    assert "import kvsearch\n" in code_file
    assert "from kvsearch" not in code_file
    card = (tmp_path / "made" / "README.md").read_text()
    assert "- custom_generate" in card
    assert "library_name: transformers" in card
    assert "which transformers runs, needs\ntorch and transformers alone." in card
    require_equal(model, kvsearch.load_plan(tmp_path / "made"), str(tmp_path / "made"))
