"""The tables of LAVa (Findings of EMNLP 2025)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvsearch.papers.asks import (
    AWARE,
    CORE,
    INFINITEBENCH_TOKENS,
    LONGBENCH,
    LONGBENCH_TOKENS,
    NIAH_LENGTHS,
    RULER_FORMS,
    SHORT,
    ruler,
)
from kvsearch.papers.table import Ask, PaperTable, Row, Scale, Stage

MISTRAL = {"Mistral-7B-Instruct-v0.2": "Mistral-7B"}
QWEN_7B = {"Qwen2.5-7B-Instruct": "Qwen2.5-7B"}
LARGER = {"Qwen2.5-14B-Instruct": "Qwen2.5-14B", "Qwen2.5-32B-Instruct": "Qwen2.5-32B"}
LLAMA = {"Meta-Llama-3-8B-Instruct": "Llama3-8B", "Llama-3-8B-Instruct": "Llama3-8B"}
METHODS = {
    "pyramid": "PyramidKV", "uniform": "SnapKV", "ada-pyramid": "Ada-PyramidKV", "adakv": "Ada-SnapKV", "cake": "CAKE",
    "lava": "LAVa",
}  # fmt: skip
ABLATION = {"lava": "LAVa", "lava-uniform": "LAVa - layer", "lava-equal-heads": "LAVa - head"}
LAYERS = {"lava-pyramid": "LAVa-Pyramid", "lava-uniform": "LAVa-Uniform", "lava": "LAVa"}
LOSSES = {"adakv": "AdaKV", "lava": "LAVa"}
BUDGETS = (128, 256, 512, 1024)
SHORT_FORM = Scale((CORE,), (24, 32, 48, 64), window=8)
CHANGED = (
    "budgets count entries of a kv head and are held exactly: LAVa's code keeps up to 4.5% more",
    "pyramids fall 20-fold and CAKE's exponents are those of its authors: the paper reports the best it tuned",
)
SMALLER = (f"{SHORT} in place of the paper's", "a window of 8 in place of 32, and budgets to fit these prompts")


def _stages(methods: Mapping[str, str], losses: bool = False) -> Callable[[Scale], list[Stage]]:
    def stages(scale: Scale) -> list[Stage]:
        return [_evaluation(scale, ask, tuple(methods), losses) for ask in scale.asks]

    return stages


def _evaluation(scale: Scale, ask: Ask, methods: tuple[str, ...], losses: bool) -> Stage:
    settings = (f"window={scale.window}", "kernel=7", "pooling=max")
    options = {**ask.options, **scale.sizes, "protocol": AWARE, "settings": settings, "losses": losses}
    name = f"scores-{ask.block}" if ask.block else "scores"
    return Stage(name, "evaluate", f"asking {ask.tasks}", options, methods, ask.block, ask.tokens)


def _table(
    number: int,
    shows: str,
    models: Mapping[str, str],
    paper: Scale,
    *,
    methods: Mapping[str, str] = METHODS,
    bundled: Scale = SHORT_FORM,
    average: str = "macro",
    changed: tuple[str, ...] = (),
) -> PaperTable:
    return PaperTable(
        f"lava-table{number}", f"Table {number}", shows, models, paper, bundled, _stages(methods),
        tuple(Row(label, method) for method, label in methods.items()),
        average=average, changed=(*CHANGED, *changed), smaller=SMALLER,
    )  # fmt: skip


_LONGBENCH = Scale((LONGBENCH,), BUDGETS)
_LOSS_TASKS = "longbench:qasper,hotpotqa,gov_report,triviaqa,passage_retrieval_zh,lcc"
_NEEDLES = Ask("niah", 20, NIAH_LENGTHS)
_ENGLISH_LONG = Ask("infinitebench:lava", 503, tokens=INFINITEBENCH_TOKENS)

TABLES = (
    _table(2, "six methods on LongBench", MISTRAL, _LONGBENCH, average="lava-mistral"),
    _table(6, "six methods on LongBench", QWEN_7B, _LONGBENCH, average="lava-qwen"),
    _table(
        7, "six methods on LongBench, larger models", LARGER, Scale((LONGBENCH,), (128, 512)),
        bundled=Scale((CORE,), (24, 48), window=8), average="lava-qwen",
    ),
    _table(8, "six methods on LongBench", LLAMA, _LONGBENCH, average="lava-llama3"),
    _table(
        9, "six methods on needles in a haystack", {**MISTRAL, **QWEN_7B}, Scale((_NEEDLES,), (128, 1024)),
        bundled=Scale((Ask("synthetic:single", 6, (512,)),), (24, 64), window=8),
        changed=("needles in kvsearch's own story of 1,000 to 8,000 tokens; LAVa has essays up to the model's most",),
    ),
    _table(
        10, "what LAVa loses without budgets of layers, or of heads", MISTRAL, _LONGBENCH, methods=ABLATION,
        average="lava-mistral",
    ),
    _table(
        11, "six methods on RULER at three lengths", MISTRAL,
        Scale(tuple(ruler(length, qa=False, block=f"{length // 1024}K") for length in (4096, 8192, 16_384)), (1024,)),
        bundled=Scale(
            (RULER_FORMS, Ask("synthetic:ruler", 2, (768,), block="768 tokens")), (48,), window=8,
        ),
        changed=("RULER's 11 generated tasks, as in LAVa's code; the length of replies is each task's own",),
    ),
    _table(
        12, "six methods on InfiniteBench", {"Mistral-7B-LongPO-128K": "Mistral-7B-LongPO-128K"},
        Scale((_ENGLISH_LONG,), (10_000,)), bundled=Scale((CORE,), (48,), window=8),
    ),
    _table(
        13, "three ways to share the budget out between layers", MISTRAL, _LONGBENCH, methods=LAYERS,
        average="lava-mistral",
    ),
    PaperTable(
        "lava-table14", "Table 14", "the loss of attention outputs, first and last layer", MISTRAL,
        Scale((Ask(_LOSS_TASKS, 20, tokens=LONGBENCH_TOKENS),), (128,)), Scale((CORE,), (32,), window=8),
        _stages(LOSSES, losses=True), tuple(Row(label, method) for method, label in LOSSES.items()), view="losses",
        changed=(CHANGED[0], "at 128 entries per kv head and on 20 contexts of a task: the paper says neither"),
        smaller=SMALLER,
    ),
)  # fmt: skip
