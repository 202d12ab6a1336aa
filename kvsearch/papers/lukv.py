"""The tables and figures of LU-KV (arXiv 2602.08585)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvsearch.papers.asks import AGNOSTIC, CORE, ENGLISH, RULER_FORMS, SHORT, ruler
from kvsearch.papers.table import Ask, Columns, PaperTable, Row, Scale, Stage

MODELS = {
    "Mistral-7B-Instruct-v0.3": "Mistral-7B-v0.3", "Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "Meta-Llama-3.1-8B-Instruct": "Llama-3.1-8B", "Qwen2.5-32B-Instruct": "Qwen2.5-32B",
}  # fmt: skip
NAMES = {"snapkv": "SnapKV", "keydiff": "KeyDiff", "expected_attention": "EA"}
TWO, THREE = ("snapkv", "keydiff"), ("snapkv", "keydiff", "expected_attention")
CHANGED = (
    "calibrated on the questions of kvsearch's own texts: the paper's novel is not published",
    "layers are made comparable by equal mass: the paper asks for it without saying how",
    "all methods of a metric protect four sinks; a total is held exactly, not rounded down",
)
SMALLER = (f"{SHORT} in place of LongBench or RULER", "a window of 8 in place of 32", "8 questions of calibration")


def _params(metric: str, scale: Scale) -> dict[str, Any]:
    """App. D and E: four sinks; under SnapKV a window of 32 and pooling over 7, else one recent entry."""
    if metric == "snapkv":
        return {"sinks": 4, "window": scale.window, "kernel": 7, "pooling": "avg"}
    return {"sinks": 4, "window": 1} | ({"epsilon": 0.02} if metric == "expected_attention" else {})


def _profile(metric: str, scale: Scale, gap: bool = True) -> Stage:
    options = {
        "method": "lukv", "policy": metric, "params": _params(metric, scale), "normalization": "layer",
        "shrink": False, "check": False, "gap": gap, "questions": scale.questions,
    }  # fmt: skip
    told = "" if gap else " without the optimality gap"
    return Stage(f"lukv-{metric}{'' if gap else '-no-gap'}", "calibrate", f"measuring {NAMES[metric]}{told}", options)


def _pyramid(metric: str) -> str:
    return f"pyramid:{metric}" + (":window=8" if metric == "snapkv" else "")


def _main(metrics: Sequence[str]) -> Callable[[Scale], list[Stage]]:
    def stages(scale: Scale) -> list[Stage]:
        (ask,) = scale.asks
        methods = [
            method
            for metric in metrics
            for method in (
                f"uniform:{metric}", _pyramid(metric), f"adakv:{metric}", f"lukv-{metric}={{lukv-{metric}}}",
            )
        ]  # fmt: skip
        return [*(_profile(metric, scale) for metric in metrics), _evaluation(scale, ask, methods)]

    return stages


def _ablation(scale: Scale) -> list[Stage]:
    (ask,) = scale.asks
    profiles = [_profile(metric, scale, gap) for metric in TWO for gap in (False, True)]
    return [*profiles, _evaluation(scale, ask, [f"{one.name}={{{one.name}}}" for one in profiles])]


def _evaluation(scale: Scale, ask: Ask, methods: Sequence[str]) -> Stage:
    options = {**ask.options, **scale.sizes, "protocol": AGNOSTIC}
    return Stage("scores", "evaluate", f"asking {ask.tasks}", options, tuple(methods), tokens=ask.tokens)


def _rows(metrics: Sequence[str]) -> tuple[Row, ...]:
    return tuple(
        Row(f"{name} ({NAMES[metric]})", method)
        for metric in metrics
        for name, method in (
            ("Uniform", f"uniform:{metric}"), ("Pyramid", _pyramid(metric)), ("Ada", f"adakv:{metric}"),
            ("LU-KV", f"lukv-{metric}"),
        )
    )  # fmt: skip


def _table(
    number: int, shows: str, metrics: Sequence[str], ask: Ask, ratio: float = 0.8, columns: Columns = "tasks"
) -> PaperTable:
    short = CORE if ask is ENGLISH else RULER_FORMS
    average = "lukv" if ask is ENGLISH else "macro"
    changed = (*CHANGED, *([] if ask is ENGLISH else ["RULER's questions are drawn anew, by kvsearch's generator"]))
    return PaperTable(
        f"lukv-table{number}", f"Table {number}", shows, MODELS, Scale((ask,), ratios=(ratio,)),
        Scale((short,), ratios=(ratio,), window=8, questions=8), _main(metrics), _rows(metrics),
        columns=columns, average=average, changed=changed, smaller=SMALLER,
    )  # fmt: skip


def _figures(scale: Scale) -> list[Stage]:
    metrics = [_profile(metric, scale) for metric in THREE]
    static = {"method": "adakv", "policy": "snapkv", "params": _params("snapkv", scale), "check": False}
    return [
        *metrics,
        Stage("adakv", "calibrate", "averaging what AdaKV decides", {**static, "questions": scale.questions}),
    ]


TABLES = (
    _table(1, "four allocations under two metrics on LongBench, by category", TWO, ENGLISH, columns="categories"),
    _table(2, "four allocations under two metrics on RULER at 16K", TWO, ruler(16_384)),
    PaperTable(
        "lukv-table3", "Table 3", "LU-KV with and without the optimality gap on LongBench", MODELS,
        Scale((ENGLISH,), ratios=(0.8,)), Scale((CORE,), ratios=(0.8,), window=8, questions=8), _ablation,
        tuple(
            Row(f"LU-KV ({NAMES[metric]}, {told} gap)", f"lukv-{metric}{tail}")
            for metric in TWO
            for told, tail in (("w/o", "-no-gap"), ("w/", ""))
        ),
        average="lukv", changed=CHANGED, smaller=SMALLER,
    ),
    _table(4, "four allocations under two metrics on LongBench, half evicted", TWO, ENGLISH, 0.5),
    _table(5, "four allocations under three metrics on LongBench", THREE, ENGLISH),
    _table(6, "four allocations under three metrics on RULER at 16K", THREE, ruler(16_384)),
    _table(7, "four allocations under three metrics on RULER at 4K", THREE, ruler(4096)),
    PaperTable(
        "lukv-figures", "Figures 1, 2b, 3, 4 and 6",
        "percent of importance kept by budget (1), evicted by layer (3, 4, 6), rank correlation of local ratios (2b)",
        MODELS,
        Scale((), ratios=(0.8,)), Scale((), ratios=(0.8,), window=8, questions=8), _figures, view="profiles",
        changed=(
            *CHANGED, "of all calibration questions in place of HotpotQA's",
            "AdaKV's loss is that of its budgets averaged over the contexts",
        ),
        smaller=SMALLER[1:],
    ),
)  # fmt: skip
