"""Plans beside a model: written there, found there, kept by transformers, and refused where they do not belong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, pipeline

import kvsearch
from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.plan import Plan
from kvsearch.plan.saved import MODEL_KEY, save_plan
from tests.cli.conftest import done, invoke
from tests.tiny import loaded, plan_for

SMALL, LARGE = 8, 16  # entries of every head, of 40: 0.8 and 0.6 are evicted


def plan_of(made: Any, budget: int, **changes: Any) -> Plan:
    return plan_for(made, [[budget] * made.fingerprint.kv_heads] * made.fingerprint.layers, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with two plans in files beside its folder."""
    made = loaded()
    made.model.save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")
    for name, budget in (("small", SMALL), ("large", LARGE)):
        save_plan(plan_of(made, budget), tmp_path / f"{name}.json")
    return tmp_path / "model"


def export(folder: Path, name: str, *more: str) -> tuple[int, str, str]:
    return invoke("export", folder.parent / f"{name}.json", "--to", "model", "-o", folder, *more)


def of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_a_plan_is_found_beside_its_model(folder: Path, tmp_path: Path) -> None:
    before = json.loads((folder / "config.json").read_text())
    assert export(folder, "small")[0] == 0
    after = json.loads((folder / "config.json").read_text())
    assert after.pop(MODEL_KEY).keys() == {"0.8"}
    assert after == before
    plan = kvsearch.load_plan(tmp_path / "small.json")
    assert kvsearch.load_plan(folder / "kvsearch") == plan
    model = of(folder)
    assert kvsearch.load_plan("auto", model) == plan
    ids = torch.randint(0, 60, (1, 40))
    with kvsearch.attach(model) as found, kvsearch.attach(model, plan) as given:
        replies = [planned.generate(ids, max_new_tokens=5, do_sample=False).tolist() for planned in (found, given)]
        assert replies[0] == replies[1]
        assert found.cache.entries().max() <= SMALL + 5
        pipe = pipeline("text-generation", model=found, tokenizer=loaded().tokenizer)
        assert pipe("a b c", max_new_tokens=2, do_sample=False)


def test_transformers_keeps_the_key(folder: Path, tmp_path: Path) -> None:
    export(folder, "small")
    of(folder).save_pretrained(tmp_path / "copy")
    copy = of(tmp_path / "copy")
    assert getattr(copy.config, MODEL_KEY) == getattr(of(folder).config, MODEL_KEY)
    with pytest.raises(UsageError, match=r"copy/kvsearch/plan\.json is not the plan that the config\.json beside it"):
        kvsearch.attach(copy)
    shutil.copytree(folder / "kvsearch", tmp_path / "copy" / "kvsearch")
    assert kvsearch.attach(copy).program is not None


def test_several_plans_by_size(folder: Path, tmp_path: Path) -> None:
    assert export(folder, "small")[0] == export(folder, "large")[0] == 0
    model = of(folder)
    with pytest.raises(UsageError, match=r"several plans lie beside the model .*: say which size, 0\.6 or 0\.8"):
        kvsearch.attach(model)
    for name, size in (("small", 0.8), ("large", "0.6")):
        assert kvsearch.load_plan("auto", model, size=size) == kvsearch.load_plan(tmp_path / f"{name}.json")
    with pytest.raises(UsageError, match=r"unknown size '0\.5'"):
        kvsearch.load_plan("auto", model, size=0.5)


def test_the_card_of_the_model_has_a_section_for_every_plan(folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# Ours\n")
    assert export(folder, "small")[0] == export(folder, "large")[0] == 0
    card = ModelCard.load(folder / "README.md")
    heads = [line for line in card.text.splitlines() if line.startswith(("# ", "## "))]
    assert heads == ["# Ours", "## KV-cache plan 0.8", "## KV-cache plan 0.6"]
    assert "--plan FOLDER/kvsearch/plan-0.6.json" in card.text
    done("verify", folder)
    (folder / "README.md").write_text("---\n[1\n---\n")
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    code, _, error = export(folder, "large", "--force")
    assert (code, error.count("\n")) == (2, 1)
    assert "the front matter of the README.md beside the model cannot be read" in error
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    (folder / "kvsearch" / "plan.json").write_bytes(b"{}")
    assert "plan.json is not the plan that the config.json beside it names" in invoke("verify", folder)[1]


def test_no_place_outside_the_folder_is_written(folder: Path) -> None:
    export(folder, "small")
    config = json.loads((folder / "config.json").read_text())
    config[MODEL_KEY]["0.8"]["file"] = "../../stolen.json"
    (folder / "config.json").write_text(json.dumps(config))
    assert export(folder, "small", "--force")[0] == 0
    assert not (folder.parents[1] / "stolen.json").exists()
    assert (folder / "kvsearch" / "stolen.json").exists()


def test_a_model_that_has_changed_since_is_refused(folder: Path, tmp_path: Path) -> None:
    export(folder, "small")
    model = of(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(IncompatibleError, match="it has other weights") as caught:
        kvsearch.attach(model)
    assert "\n" not in str(caught.value)
    model.save_pretrained(folder)
    code, _, error = export(folder, "large")
    assert (code, error.count("\n")) == (4, 1)
    assert "it has other weights" in error


def test_what_is_not_there_or_damaged_is_one_line(folder: Path) -> None:
    model = of(folder)
    with pytest.raises(UsageError, match="there is no plan beside the model"):
        kvsearch.attach(model)
    with pytest.raises(UsageError, match="give that model, too"):
        kvsearch.load_plan("auto")
    code, _, error = invoke("export", folder.parent / "small.json", "--to", "model", "-o", folder.parent / "none")
    assert code == 2
    assert error.count("\n") == 1
    export(folder, "small")
    (folder / "kvsearch" / "plan.json").write_bytes(b"{}")
    with pytest.raises(UsageError, match="is not the plan that the config"):
        kvsearch.attach(of(folder))
    for damaged in ("plan.json", {"0.8": "plan.json"}, {"0.8": {"file": "plan.json"}}):
        setattr(model.config, MODEL_KEY, damaged)
        with pytest.raises(UsageError, match=r"kv_cache_plan in the configuration of .* is damaged"):
            kvsearch.attach(model)


def test_generate_finds_it(folder: Path) -> None:
    arguments = ("generate", folder, "--context", "a b c d " * 20, "--prompt", "a", "--max-new-tokens", "2", "--json")
    full = json.loads(invoke(*arguments)[1])
    export(folder, "small")
    found = json.loads(invoke(*arguments)[1])
    given = json.loads(invoke(*arguments, "--plan", folder.parent / "small.json")[1])
    assert found == given
    assert found["entries"] < full["entries"]
