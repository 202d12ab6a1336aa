"""The tables and studies of EvolKV (arXiv 2509.08315)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvsearch.papers.asks import (
    AWARE,
    CORE,
    ENGLISH,
    GSM8K_TOKENS,
    LONGBENCH_TOKENS,
    MULTI_QA,
    NIAH_LENGTHS,
    RULER_FORMS,
    SEARCHED,
    SHORT,
    SINGLE_QA,
    SIX_QA,
    SIX_SUBSETS,
    ruler,
)
from kvsearch.papers.table import Ask, PaperTable, Row, Scale, Stage

MISTRAL = {"Mistral-7B-Instruct-v0.2": "Mistral-7B-Instruct"}
LLAMA = {"Meta-Llama-3-8B-Instruct": "Llama-3-8B-Instruct", "Llama-3-8B-Instruct": "Llama-3-8B-Instruct"}
QWEN = {"Qwen2.5-1.5B-Instruct": "Qwen2.5-1.5B-Instruct", "Qwen2.5-3B-Instruct": "Qwen2.5-3B-Instruct"}
NARRATIVEQA = Ask("longbench:narrativeqa", 30, tokens=LONGBENCH_TOKENS)
FIVE_EACH = Ask(SIX_SUBSETS, 5, tokens=LONGBENCH_TOKENS)
NEEDLES = Ask("niah", 12, NIAH_LENGTHS)
HARD: dict[str, Any] = {"hard_below": 60.0, "hard_most": 35}  # section 4.2.3: at most 35 needles that score below 60
BASELINES = {"uniform": "SnapKV", "pyramid": "PyramidKV", "streaming": "StreamingLLM"}
CHANGED = (
    "searched on split train and asked on split report: the paper leaves out the samples that it searched on",
    "ten generations of a group and bounds of a budget: the paper states neither",
)
SMALLER = (
    f"{SHORT} in place of the paper's", "the loss of right answers in place of the metric, four generations, groups "
    "of two layers", "a window of 8 in place of 32, and budgets to fit these prompts",
)  # fmt: skip


def _search(scale: Scale, ask: Ask, budget: int, name: str, words: str = "", **instead: Any) -> Stage:
    """Return Algorithm 1 as the paper runs it: SnapKV's budgets, soft totals, the cache term."""
    options = {
        **ask.options, "budget": budget, "policy": "snapkv", "group_size": scale.group, "parity": True,
        "params": {"window": scale.window, "kernel": 7, "pooling": "max", "sinks": 0}, "protocol": AWARE,
        "generations": scale.generations, "objective": scale.objective, **instead,
    }  # fmt: skip
    return Stage(name, "evolve", words or f"searching at {budget} on {ask.tasks}", options, tokens=ask.tokens)


def _plan(name: str, search: str, budget: int) -> Stage:
    """Return the result of a search at a size, proportionally (section 3.2), under a name of its own."""
    return Stage(f"{name}-{budget}", "scale", f"{name} at {budget}", {"plan": f"{{{search}}}", "budget": budget})


def _evaluation(
    scale: Scale, ask: Ask, budgets: Sequence[int], plans: Sequence[str], methods: Sequence[str] = tuple(BASELINES)
) -> Stage:
    options = {
        **ask.options, "budgets": ",".join(map(str, budgets)), "protocol": AWARE, "split": "report",
        "settings": (f"window={scale.window}", "kernel=7", "pooling=max"),
        "plan": tuple(f"{{{name}-{budget}}}" for name in plans for budget in budgets),
    }  # fmt: skip
    name = f"scores-{ask.block}" if ask.block else "scores"
    return Stage(name, "evaluate", f"asking {ask.tasks}", options, tuple(methods), ask.block, ask.tokens)


def _scaled(own: Sequence[int] = (), **instead: Any) -> Callable[[Scale], list[Stage]]:
    """Return one search at the smallest budget, scaled to the others but for those that have their `own`."""

    def stages(scale: Scale) -> list[Stage]:
        least, ask = scale.budgets[0], scale.searches[0]
        searched = {
            budget: _search(scale, ask, budget, f"search-{budget}", **instead)
            for budget in scale.budgets if budget == least or budget in own
        }  # fmt: skip
        plans = [_plan("evolkv", f"search-{at if at in searched else least}", at) for at in scale.budgets]
        asked = [_evaluation(scale, one, scale.budgets, ["evolkv"]) for one in scale.asks]
        return [*searched.values(), *plans, *asked]

    return stages


def _several(
    made: Callable[[Scale], Sequence[tuple[str, Ask, Mapping[str, Any]]]], methods: Sequence[str] = tuple(BASELINES)
) -> Callable[[Scale], list[Stage]]:
    """Return several searches at the smallest budget, all asked the same; `made` says how they differ."""

    def stages(scale: Scale) -> list[Stage]:
        least, searches = scale.budgets[0], made(scale)
        found = [_search(scale, ask, least, f"search-{name}", **more) for name, ask, more in searches]
        plans = [_plan(name, f"search-{name}", at) for name, _, _ in searches for at in scale.budgets]
        names = [name for name, _, _ in searches]
        return [*found, *plans, *(_evaluation(scale, ask, scale.budgets, names, methods) for ask in scale.asks)]

    return stages


def _group_sizes(scale: Scale) -> list[tuple[str, Ask, dict[str, Any]]]:
    sizes = (2, 4, 8, 16, 32) if scale.group == Scale.group else (1, 2, 3, 6)
    return [(f"group-{size}", scale.searches[0], {"group_size": size}) for size in sizes]


def _seeds(scale: Scale) -> list[tuple[str, Ask, dict[str, Any]]]:
    return [(f"seed-{seed}", scale.searches[0], {"seed": seed}) for seed in range(3)]


def _each_search(scale: Scale) -> list[tuple[str, Ask, dict[str, Any]]]:
    return [(f"on-{ask.block}", ask, {}) for ask in scale.searches]


def _expansion(scale: Scale) -> list[Stage]:
    first, *others = scale.budgets
    ask, asked = scale.searches[0], scale.asks[0]
    searches = [_search(scale, ask, budget, f"search-{budget}") for budget in scale.budgets]
    expanded = [_plan("expanded", f"search-{first}", budget) for budget in others]
    direct = [_plan("direct", f"search-{budget}", budget) for budget in others]
    return [
        *searches, *expanded, *direct, _evaluation(scale, asked, others, ["expanded", "direct"], ["uniform"]),
    ]  # fmt: skip


def _layers(scale: Scale) -> list[Stage]:
    return [_search(scale, scale.searches[0], budget, f"search-{budget}") for budget in scale.budgets]


def _rows(plans: Mapping[str, str], baselines: Mapping[str, str] = BASELINES) -> tuple[Row, ...]:
    named = {**baselines, **{f"{name}-{{size}}": label for name, label in plans.items()}}
    return tuple(Row(label, method) for method, label in named.items())


def _table(
    name: str,
    where: str,
    shows: str,
    models: Mapping[str, str],
    paper: Scale,
    stages: Callable[[Scale], list[Stage]],
    *,
    bundled: Scale | None = None,
    rows: tuple[Row, ...] = _rows({"evolkv": "EvolKV"}),
    average: str = "macro",
    changed: tuple[str, ...] = (),
) -> PaperTable:
    short = bundled or _short((CORE,), (24, 48))
    return PaperTable(
        f"evolkv-{name}", where, shows, models, paper, short, stages, rows,
        view="scores" if rows else "layers", average=average, changed=(*CHANGED, *changed), smaller=SMALLER,
    )  # fmt: skip


def _short(asks: tuple[Ask, ...], budgets: tuple[int, ...], searches: tuple[Ask, ...] = (SEARCHED,)) -> Scale:
    return Scale(asks, budgets, window=8, generations=4, group=2, objective="nll", searches=searches)


def _one_form(name: str, block: str = "", samples: int = 6) -> Ask:
    return Ask(f"synthetic:{name}", samples, (512,), block=block)


_FIVE = (128, 256, 512, 1024, 2048)
_PAIR = (_one_form("single", "single"), _one_form("multikey", "multi"))

TABLES = (
    _table(
        "table1", "Table 1", "budgets searched on NarrativeQA at 128, scaled to five sizes, on LongBench", MISTRAL,
        Scale((ENGLISH,), _FIVE, searches=(NARRATIVEQA,)), _scaled(), average="evolkv",
    ),
    _table(
        "table2", "Table 2", "budgets searched on six subsets at 128 and at 2048, on LongBench", LLAMA,
        Scale((ENGLISH,), _FIVE, searches=(FIVE_EACH,)), _scaled(own=(2048,)), average="evolkv",
    ),
    _table(
        "table3", "Table 3", "budgets searched on GSM8K at 128, scaled, on GSM8K", {**LLAMA, **MISTRAL},
        Scale(
            (Ask("gsm8k", 1319, tokens=GSM8K_TOKENS),), (128, 256, 512),
            searches=(Ask("gsm8k", 30, tokens=GSM8K_TOKENS),),
        ),
        _scaled(), bundled=_short((_one_form("chain"),), (24, 48), (_one_form("chain"),)),
        changed=("one search for all sizes: the paper has a second one for Mistral at 256",),
    ),
    _table(
        "table4", "Table 4", "budgets searched on needles at 128, scaled, on RULER's 11 generated tasks",
        {**MISTRAL, **LLAMA}, Scale((ruler(8192, qa=False),), (128, 1024), searches=(NEEDLES,)), _scaled(**HARD),
        bundled=_short((RULER_FORMS,), (24, 48), (_one_form("single"),)),
        changed=("at 8,192 tokens; the paper has 32K for Mistral: --length 32768",),
    ),
    _table(
        "table5", "Table 5", "budgets searched on NarrativeQA at 128, on six QA datasets", QWEN,
        Scale((Ask(SIX_QA, 200, tokens=LONGBENCH_TOKENS),), (128,), searches=(NARRATIVEQA,)), _scaled(),
        bundled=_short((CORE,), (32,)),
    ),
    _table(
        "group-size", "Table 7", "how many layers are searched at a time", {**LLAMA, **MISTRAL},
        Scale((ENGLISH,), (128,), searches=(FIVE_EACH,)), _several(_group_sizes, ["uniform"]),
        bundled=_short((CORE,), (32,)),
        rows=_rows({f"group-{size}": f"ng = {size}" for size in (1, 2, 3, 4, 6, 8, 16, 32)}, {"uniform": "SnapKV"}),
        average="evolkv", changed=("searched on six subsets; Mistral's are of NarrativeQA",),
    ),
    _table(
        "repeats", "Table 8", "the same search with three seeds", LLAMA,
        Scale((ENGLISH,), (128,), searches=(NARRATIVEQA,)), _several(_seeds, ["uniform"]),
        bundled=_short((CORE,), (32,)),
        rows=_rows({f"seed-{seed}": f"run {seed + 1}" for seed in range(3)}, {"uniform": "SnapKV"}), average="evolkv",
    ),
    _table(
        "training-data", "Table 9", "budgets searched on two choices of data", MISTRAL,
        Scale(
            (ENGLISH,), (128, 512, 1024, 2048), searches=(
                Ask(SIX_QA, 5, tokens=LONGBENCH_TOKENS, block="qa"),
                Ask(SIX_SUBSETS, 5, tokens=LONGBENCH_TOKENS, block="six"),
            ),
        ),
        _several(_each_search),
        bundled=_short((CORE,), (24, 48), (_one_form("multikey", "qa"), _one_form("vote", "six"))),
        rows=_rows({"on-qa": "EvolKV, single- and multi-document QA", "on-six": "EvolKV, six subsets"}),
        average="evolkv", changed=("all sizes scaled from a search at 128",),
    ),
    _table(
        "expansion", "Table 10", "the budgets searched at 128, scaled, against searches at every size", MISTRAL,
        Scale((ENGLISH,), _FIVE[:4], searches=(NARRATIVEQA,)), _expansion, bundled=_short((CORE,), (24, 48, 96)),
        rows=_rows({"expanded": "EvolKV.ex", "direct": "EvolKV.opt"}, {"uniform": "SnapKV"}), average="evolkv",
    ),
    _table(
        "transfer", "Table 11", "budgets searched on needles at 128, scaled, on LongBench", LLAMA,
        Scale((ENGLISH,), (128, 256), searches=(NEEDLES,)), _scaled(**HARD),
        bundled=_short((CORE,), (24, 48), (_one_form("single"),)), average="evolkv",
    ),
    _table(
        "specialised", "Table 12", "budgets searched on single- and on multi-document QA", {**MISTRAL, **LLAMA},
        Scale(
            (Ask(SIX_QA, 200, tokens=LONGBENCH_TOKENS),), (128,), searches=(
                Ask(SINGLE_QA, 10, tokens=LONGBENCH_TOKENS, block="single"),
                Ask(MULTI_QA, 10, tokens=LONGBENCH_TOKENS, block="multi"),
            ),
        ),
        _several(_each_search), bundled=_short((CORE,), (32,), _PAIR),
        rows=_rows({"on-single": "EvolKV, single-document", "on-multi": "EvolKV, multi-document"}),
        changed=("both results are asked all six datasets: the paper asks each its own three",),
    ),
    _table(
        "figure3", "Figures 2a and 3", "the budgets of layers that searches find, by size", {**MISTRAL, **LLAMA},
        Scale((), _FIVE[:4], searches=(NARRATIVEQA,)), _layers, bundled=_short((), (24, 48)), rows=(),
    ),
)  # fmt: skip
