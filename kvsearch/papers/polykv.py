"""The tables of PolyKV (arXiv 2606.15157), and its Figure 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvsearch.papers.asks import AWARE, CORE, LONGBENCH, RULER_FORMS, SHORT, ruler
from kvsearch.papers.table import PaperTable, Row, Scale, Stage

MODELS = {"Llama-3.1-8B": "LLaMA", "Meta-Llama-3.1-8B": "LLaMA", "Qwen3-8B": "Qwen"}
LLAMA = {name: label for name, label in MODELS.items() if label == "LLaMA"}
BASELINES = {
    "h2o": "H2O", "tova": "TOVA", "cam": "CaM", "pyramid": "PyramidKV", "uniform": "SnapKV", "d2o": "D2O",
    "cake": "CAKE", "scissorhands": "Scissorhands", "streaming": "StreamingLLM",
}  # fmt: skip
PHASES = "decode"
SWEEP = (128, 256, 512, 768, 1024)
CHANGED = (
    "calibrated on kvsearch's own texts: the paper does not say which it took",
    "question and context are compressed as one, as the paper's baselines do it: the paper does not say",
)
DECODES = (
    "all strategies and baselines evict while decoding, where the paper's Table 3 has the score of its Table 2: the "
    "prompt is whole until the first token",
)
SMALLER = (
    f"{SHORT} in place of LongBench or RULER", "eight patterns: at a window of 8 PyramidKV's is SnapKV's",
    "4 questions of calibration, and budgets to fit these prompts",
)  # fmt: skip
RULER_AT = ("RULER's prompts have 4,096 tokens: the paper does not say how many",)


def _calibration(scale: Scale, phases: str, signals: str = "cosine,ppl,entropy") -> Stage:
    patterns: Any = "paper"
    if scale.window != Scale.window:
        small = {"window": scale.window}
        named = [{"name": name, "params": small} for name in ("snapkv", "cake", "scissorhands")]
        patterns = ["h2o", "tova", "cam", "d2o", "streaming", *named]
    options = {
        "method": "polykv", "patterns": patterns, "policy": "snapkv", "budgets": scale.budgets, "phases": phases,
        "signals": signals, "protocol": AWARE, "questions": scale.questions,
    }  # fmt: skip
    return Stage("polykv", "calibrate", "measuring what every layer loses under every pattern", options)


def _selections(scale: Scale) -> list[Stage]:
    found = [_calibration(scale, PHASES)]
    for ask in scale.asks:
        options = {**ask.options, "directory": "{polykv}", "phases": PHASES, "explore": "paper", "protocol": AWARE}
        words = f"choosing on {ask.tasks}, then the report"
        found.append(Stage(f"selection-{ask.block}", "select", words, options, block=ask.block, tokens=ask.tokens))
    return found


def _sweep(scale: Scale) -> list[Stage]:
    (ask,) = scale.asks
    plans = {"polykv-uniform": "uniform", "polykv-ppl": "ppl"}
    exports = [
        _export(f"{name}-{budget}", PHASES, "cosine", signal, budget)
        for name, signal in plans.items()
        for budget in scale.budgets
    ]
    options = {
        **ask.options, **scale.sizes, "protocol": AWARE, "phases": PHASES, "settings": (f"window={scale.window}",),
        "plan": tuple(f"{{{one.name}}}" for one in exports),
    }  # fmt: skip
    words = f"asking {ask.tasks}"
    scores = Stage("scores", "evaluate", words, options, tuple(BASELINES), tokens=ask.tokens)
    return [_calibration(scale, PHASES, "cosine,ppl"), *exports, scores]


def _export(name: str, phases: str, route: str, signal: str, budget: int) -> Stage:
    options = {
        "profile": "{polykv}", "budget": budget, "route": route, "budget_signal": signal, "phases": phases,
        "allow_harmful": True,
    }  # fmt: skip
    return Stage(name, "export", f"the strategy {name}", options)


def _signals(scale: Scale) -> list[Stage]:
    (ask,) = scale.asks
    shared = {**ask.options, "directory": "{polykv}", "protocol": AWARE}
    routes = {**shared, "signals": ("route:cosine", "route:ppl"), "phases": ("prefill", "decode", "both")}
    budgets = {**shared, "signals": ("budgets:entropy", "budgets:ppl"), "phases": ("prefill",)}
    return [
        _calibration(scale, "both"),
        Stage("routes", "validate", "judging the choice of patterns", routes, tokens=ask.tokens),
        Stage("budgets", "validate", "judging budgets", budgets, tokens=ask.tokens),
    ]


def _categories(scale: Scale) -> list[Stage]:
    found = _selections(scale)
    for ask in scale.asks:
        options = {
            **ask.options, **scale.sizes, "protocol": AWARE, "phases": PHASES, "split": "report",
            "settings": (f"window={scale.window}",), "plan": (f"{{selection-{ask.block}}}",),
        }  # fmt: skip
        words, methods = f"asking {ask.tasks}", tuple(BASELINES)
        found.append(Stage(f"scores-{ask.block}", "evaluate", words, options, methods, ask.block, ask.tokens))
    return found


def _strategy(scale: Scale) -> list[Stage]:
    (budget,) = scale.budgets
    return [
        _calibration(scale, "prefill", "ppl,entropy"),
        _export("figure3", "prefill", "ppl", "entropy", budget),
    ]


_BASELINES = tuple(Row(label, method) for method, label in BASELINES.items())
_LONGBENCH, _RULER = replace(LONGBENCH, block="LongBench"), ruler(4096, block="RULER")
_SHORT = (replace(CORE, block="LongBench"), replace(RULER_FORMS, block="RULER"))
_TWO, _TWO_SHORT = Scale((_LONGBENCH, _RULER), (512,)), Scale(_SHORT, (32,), window=8, questions=4)

TABLES = (
    PaperTable(
        "polykv-table1", "Table 1", "the best strategy against the best single policy", MODELS, _TWO, _TWO_SHORT,
        _selections, view="selections",
        changed=(
            *CHANGED, *RULER_AT, *DECODES, "top 1 is chosen on one half of the questions and reported on others, as is "
            "the best baseline: the paper reports the best of all it tried",
        ),
        smaller=SMALLER,
    ),
    PaperTable(
        "polykv-table2", "Table 2", "patterns by cosine with even budgets or by perplexity, at five sizes", LLAMA,
        Scale((LONGBENCH,), SWEEP), Scale((CORE,), (24, 32, 48), window=8, questions=4), _sweep,
        (*_BASELINES, Row("Uniform", "polykv-uniform-{size}"), Row("PPL Alloc.", "polykv-ppl-{size}")), view="best",
        average="polykv", changed=(*CHANGED, *DECODES), smaller=SMALLER,
    ),
    PaperTable(
        "polykv-table3", "Table 3", "every signal against its inverse", MODELS, Scale((LONGBENCH,), (512,)),
        Scale((CORE,), (32,), window=8, questions=4), _signals, view="signals",
        changed=(
            *CHANGED, "asked on split select, which leaves split report to what is chosen; even and random controls "
            "are asked, too: see validation.json",
        ),
        smaller=SMALLER,
    ),
    PaperTable(
        "polykv-table4", "Table 4", "the best strategy minus the best single policy, by category", MODELS, _TWO,
        _TWO_SHORT, _categories, (*_BASELINES, Row("PolyKV", "selection-{block}")), view="categories",
        changed=(*CHANGED, *RULER_AT, *DECODES), smaller=SMALLER,
    ),
    PaperTable(
        "polykv-figure3", "Figure 3", "the pattern and the budget of every layer", LLAMA, Scale((), (512,)),
        Scale((), (32,), window=8, questions=4), _strategy, view="layers", changed=CHANGED[:1], smaller=SMALLER[1:],
    ),
)  # fmt: skip
