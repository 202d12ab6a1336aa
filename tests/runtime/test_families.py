"""Every family of the table does under plans what it should, and what is special about some of them is done right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvsearch.core.errors import IncompatibleError, UsageError
from kvsearch.models.architecture import describe
from kvsearch.runtime import PlanCache, attach
from kvsearch.runtime.attention import NAME
from kvsearch.runtime.observe import DensePass
from kvsearch.runtime.program import make_full_program
from kvsearch.runtime.shared_prefill import join_caches, prefill_all
from tests.families import FAMILIES, REFUSED, SPECIAL, TINY, build, prompts
from tests.runtime.family_check import FamilyReport, check_family
from tests.runtime.helpers import (
    assert_close,
    feed,
    one_by_one,
    plan_for,
    random_eviction,
    running,
)

WINDOWS = ("gemma2", "gemma3")
INTERLEAVED = ("cohere", "ernie4_5", "glm", "glm4", "helium", "hunyuan_v1_dense")
GATED = ("bitnet", "qwen3_5", "qwen3_next")

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MARK, END = "<!-- the list is made by tests/runtime/test_families.py -->", "<!-- end of the list -->"


EACH_KIND = [pytest.param(name, marks=[] if name in (*FAMILIES, *SPECIAL) else [pytest.mark.nightly]) for name in TINY]


def describe_verdict(report: FamilyReport) -> str:
    """The end of a line of the list in docs/models.md; families with the same end share a line."""
    return f" | {report.verdict} | {report.planned_layers} | {report.why} |"


def listed_verdicts() -> dict[str, str]:
    """The families of the list in docs/models.md, each with the end of its line."""
    rows = PAGE.read_text(encoding="utf-8").partition(MARK)[2].partition(END)[0].strip().splitlines()[2:]
    return {
        family: " | " + end
        for names, _, end in (row[2:].partition(" | ") for row in rows)
        for family in names.split(", ")
    }


def write_page() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARK)
    families: dict[str, list[str]] = {}
    for family in TINY:
        families.setdefault(describe_verdict(check_family(family)), []).append(family)
    lines = ["| families | verdict | planned layers | why |", "|---|---|---|---|"]
    lines += [f"| {', '.join(names)}{end}" for end, names in families.items()]
    PAGE.write_text(before + "\n".join([MARK, "", *lines, "", END]) + rest.partition(END)[2], encoding="utf-8")


@pytest.mark.parametrize("family", EACH_KIND)
def test_a_family_does_what_it_should(family: str) -> None:
    report = check_family(family)
    partly = (*WINDOWS, *INTERLEAVED, *GATED, *SPECIAL)
    verdict = "refused" if family in REFUSED else "partly" if family in partly else "supported"
    assert report.verdict == verdict, report.why
    assert ("are left alone" in report.why) == (family in (*WINDOWS, *SPECIAL))
    assert ("turned back" in report.why) == (family in INTERLEAVED)
    assert ("gate or norm" in report.why) == (family in GATED)
    assert listed_verdicts()[family] == describe_verdict(report), "run python -m tests.runtime.test_families"


@pytest.mark.parametrize("family", ["jamba", "qwen3_next"])
def test_one_prompt_serves_many_plans(family: str) -> None:
    """Each goes its own way afterwards, alone or as a row of one batch; a running state is not taken back."""
    model = build(family)
    ids, mask = prompts(1, 30)
    programs = [random_eviction(model, mask, seed=seed).program for seed in (0, 1)]
    after = prompts(1, 4, seed=1)[0]

    def go_on(cache: PlanCache, rows: int = 1) -> Any:
        return torch.cat(feed(model, cache, one_by_one(after.repeat(rows, 1)), mask.repeat(rows, 1)), 1)

    with running(model, NAME), torch.no_grad():
        alone = []
        for program in programs:
            cache = PlanCache(model, program)
            model(ids, past_key_values=cache)
            alone.append(go_on(cache))
        for together in (False, True):
            caches = [PlanCache(model, program) for program in programs]
            prefill_all(model, caches, ids, mask)
            found = (
                [*go_on(join_caches(caches, mask.repeat(2, 1), [30, 30]), 2).split(1)]
                if together
                else [go_on(cache) for cache in caches]
            )
            for actual, expected in zip(found, alone, strict=True):
                assert_close(actual, expected, 1e-4)
        with pytest.raises(UsageError, match="cannot take tokens back: layers 0, 2 carry a running state"):
            caches[0].crop(-1)


def test_a_family_that_forgets_its_state() -> None:
    """Several tokens at once after a prompt are refused where transformers' own code answers them wrongly."""
    model = build("jamba")
    ids, mask = prompts(1, 12)
    refusal = "transformers' code for jamba forgets its running state"
    with running(model, NAME), torch.no_grad():
        cache = PlanCache(model, make_full_program(model))
        feed(model, cache, [(ids, mask), *one_by_one(ids[:, :2])])
        with pytest.raises(IncompatibleError, match=refusal):
            model(ids[:, :2], past_key_values=cache)
        begun = PlanCache(model, make_full_program(model), prompt_length=12)
        model(ids[:, :2], past_key_values=begun)
        with pytest.raises(IncompatibleError, match=refusal):
            model(ids[:, 2:], past_key_values=begun)
        observed = DensePass(model, {1: [], 3: []}, lambda prompt: prompt, ids)
        with pytest.raises(IncompatibleError, match=refusal), observed.following(ids[:, :3]):
            pass


@pytest.mark.parametrize("family", [*WINDOWS, *SPECIAL])
def test_plans_keep_the_indices_of_the_model(family: str) -> None:
    model = build(family)
    layers = describe(model).full_layers
    budgets = [[5, 9] if index in layers else None for index in range(4)]
    ids, mask = prompts(1, 30)
    with attach(model, plan_for(model, budgets)) as planned:
        planned.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
        assert planned.cache.entries().squeeze(1).tolist() == [[7, 11]] * 2
        assert tuple(planned.cache.planned) == layers
    elsewhere = [None if index in layers else [5, 9] for index in range(4)]
    kind = next(kind for kind in describe(model).kinds if kind != "full_attention")
    with pytest.raises(IncompatibleError, match=f"the plan budgets layers .*{kind}"):
        attach(model, plan_for(model, elsewhere))


def test_long_prompts_are_attended_to_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention of some rows at a time is that of all rows."""
    for family, pads in (("gpt_oss", 0), ("gemma2", 5)):
        model = build(family)
        ids, mask = prompts(2, 30, pads=pads)
        given = {"attention_mask": mask} if pads else {}
        with torch.no_grad():
            expected = model(ids, **given).logits
            with running(model, NAME), monkeypatch.context() as patch:
                patch.setattr("kvsearch.runtime.attention.EAGER_LOGITS", 2 * 8 * 30 * 7)
                actual = model(ids, **given, past_key_values=PlanCache(model, make_full_program(model))).logits
        assert_close(actual[mask.bool()], expected[mask.bool()])


if __name__ == "__main__":
    write_page()
