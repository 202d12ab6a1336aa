"""LongBench's datasets with their settings, and the sets of them that papers average over."""

from __future__ import annotations

from dataclasses import dataclass

SINGLE, MULTI, SUMMARY = "single-document QA", "multi-document QA", "summarisation"
FEW_SHOT, SYNTHETIC, CODE = "few-shot", "synthetic", "code"


@dataclass(frozen=True)
class Spec:
    """Settings of one dataset: how long replies may be, how they are scored, and how they are asked for.

    Of a reply only the first line is scored where `first_line` is set. Models with a chat template are asked without
    it where `chat` is off: there the prompt is text that is continued.
    """

    category: str
    metric: str
    max_new_tokens: int
    chat: bool = True
    first_line: bool = False
    stops: tuple[str, ...] = ()
    chinese: bool = False


# the official order
SPECS: dict[str, Spec] = {
    "narrativeqa": Spec(SINGLE, "qa_f1", 128),
    "qasper": Spec(SINGLE, "qa_f1", 128),
    "multifieldqa_en": Spec(SINGLE, "qa_f1", 64),
    "multifieldqa_zh": Spec(SINGLE, "qa_f1_zh", 64, chinese=True),
    "hotpotqa": Spec(MULTI, "qa_f1", 32),
    "2wikimqa": Spec(MULTI, "qa_f1", 32),
    "musique": Spec(MULTI, "qa_f1", 32),
    "dureader": Spec(MULTI, "rouge_l_zh", 128, chinese=True),
    "gov_report": Spec(SUMMARY, "rouge_l", 512),
    "qmsum": Spec(SUMMARY, "rouge_l", 512),
    "multi_news": Spec(SUMMARY, "rouge_l", 512),
    "vcsum": Spec(SUMMARY, "rouge_l_zh", 512, chinese=True),
    "trec": Spec(FEW_SHOT, "classification", 64, chat=False, first_line=True),
    "triviaqa": Spec(FEW_SHOT, "qa_f1", 32, chat=False, first_line=True),
    "samsum": Spec(FEW_SHOT, "rouge_l", 128, chat=False, first_line=True, stops=("\n",)),
    "lsht": Spec(FEW_SHOT, "classification", 64, chat=False, first_line=True, chinese=True),
    "passage_count": Spec(SYNTHETIC, "count", 32),
    "passage_retrieval_en": Spec(SYNTHETIC, "retrieval", 32),
    "passage_retrieval_zh": Spec(SYNTHETIC, "retrieval_zh", 32, chinese=True),
    "lcc": Spec(CODE, "edit_similarity", 64, chat=False),
    "repobench-p": Spec(CODE, "edit_similarity", 64, chat=False),
}

LONGBENCH_TASKS = tuple(SPECS)
LONGBENCH_ENGLISH = tuple(name for name, spec in SPECS.items() if not spec.chinese)
# LongBench-E has files of its own, with contexts of all lengths in like numbers
LONGBENCH_E = tuple(f"{name}_e" for name in LONGBENCH_ENGLISH if name not in ("narrativeqa", "musique", "qmsum"))

# LAVa tells tasks whose answer stands in the context, scored by F1 or accuracy, from those that write text or code,
# scored by ROUGE or edit similarity. It names some of each; the metric sorts the others (dureader is the one
# QA dataset that is scored by ROUGE). passage_count is in neither: LAVa has 20 datasets.
_GENERATES = ("rouge_l", "rouge_l_zh", "edit_similarity")
GENERATION = tuple(name for name, spec in SPECS.items() if spec.metric in _GENERATES)
EXTRACTION = tuple(name for name in LONGBENCH_TASKS if name not in (*GENERATION, "passage_count"))

# Plain means over datasets, not over categories or lengths. LAVa's tables differ in what they leave out.
AVERAGES: dict[str, tuple[str, ...]] = {
    "polykv": LONGBENCH_TASKS,
    "lukv": LONGBENCH_ENGLISH,
    "lava-mistral": tuple(name for name in LONGBENCH_TASKS if name != "passage_count"),
    "lava-qwen": LONGBENCH_TASKS,
    "lava-llama3": tuple(name for name in LONGBENCH_TASKS if name != "vcsum"),
    "lava-extraction": EXTRACTION,  # LAVa, Figure 2
    "lava-generation": GENERATION,
    "evolkv": LONGBENCH_ENGLISH,  # without the samples that were trained on: score a split other than "all"
}
