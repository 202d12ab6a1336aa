"""A folder of small tasks for lm-evaluation-harness, in words of the bundled vocabulary; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.tiny import document

DOCUMENTS = 5
QUESTION = "{{context}} {{question}}"
MEAN = {"aggregation": "mean", "higher_is_better": True}
GENERATE = {
    "output_type": "generate_until",
    "doc_to_text": QUESTION,
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 9, "do_sample": False},
    "metric_list": [{"metric": "exact_match", **MEAN}],
}
CHOOSE = {
    "output_type": "multiple_choice",
    "doc_to_text": QUESTION,
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "metric_list": [{"metric": "acc", **MEAN}, {"metric": "acc_mutual_info", **MEAN}],
}
CODE = "def fail(doc, results):\n    raise RuntimeError('no such luck')\n"


def rows() -> list[dict[str, Any]]:
    """Contexts of several lengths, a question each, and answers of one to five words to choose from."""
    made = []
    for seed in range(DOCUMENTS):
        text = document(50 + 13 * seed, seed, 3)
        asked = text.questions[0]
        right = asked.answers[0]
        wrong = [other.answers[0] for other in text.questions[1:3]]
        made.append(
            {
                "context": " ".join(text.words[1:]),
                "question": asked.question,
                "answer": right,
                "choices": [right, *wrong, right.split()[0], "the cat sees the dog"],
                "gold": 0,
            }
        )
    return made


def write_folder(folder: Path) -> Path:
    """Write tasks: small_generate, small_choose, small_shots, small_likelihood, and ones that cannot run."""
    data = folder / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows()))
    (folder / "code.py").write_text(CODE)
    _write(folder, "small_generate", GENERATE)
    _write(folder, "small_choose", CHOOSE)
    _write(folder, "small_shots", {**CHOOSE, "fewshot_split": "test", "num_fewshot": 1})
    _write(
        folder,
        "small_likelihood",
        {
            "output_type": "loglikelihood",
            "doc_to_text": QUESTION,
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc", **MEAN}],
        },
    )
    _write(
        folder,
        "small_rolling",
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{context}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    )
    _write(folder, "small_unsafe", {**GENERATE, "unsafe_code": True})
    _write(folder, "small_sampling", {**GENERATE, "generation_kwargs": {"do_sample": True, "temperature": -0.7}})
    _write(folder, "small_broken", {**GENERATE, "output_type": "guess"})
    _write(folder, "small_remote", {**GENERATE, "dataset_path": "nobody/nothing", "dataset_kwargs": cached(folder)})
    _write(folder, "small_failing", {**CHOOSE, "process_results": "FUNCTION"})
    failing = folder / "small_failing.yaml"
    failing.write_text(failing.read_text().replace("FUNCTION", "!function code.fail"))
    return folder


def _write(folder: Path, name: str, content: dict[str, Any]) -> None:
    kept = {"data_files": {"test": str(folder / "rows.jsonl")}, **cached(folder)}
    task = {"task": name, "test_split": "test", "dataset_path": "json", "dataset_kwargs": kept, **content}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task, sort_keys=False))


def cached(folder: Path) -> dict[str, str]:
    """Keep what datasets makes of the rows out of the user's own cache."""
    return {"cache_dir": str(folder / "cache")}
