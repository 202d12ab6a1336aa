"""Single replies in the files of kvpress' evaluation, a folder per method, as its leaderboard reads them."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsearch.core.items import group_by_key
from kvsearch.core.resources import read_package_version
from kvsearch.evaluation.names import FULL
from kvsearch.plan.schema import QUESTION_AWARE
from kvsearch.tasks.base import Task
from kvsearch.tasks.ruler import DrawnRulerTask, RulerTask

if TYPE_CHECKING:
    from kvsearch.evaluation.compare import Evaluation
    from kvsearch.evaluation.ready_methods import ReadyMethod

PREDICTIONS = "predictions.csv"
METRICS_FILE = "metrics.json"
SETTINGS_FILE = "config.yaml"
PREDICTION_COLUMNS = (
    "task", "question", "answer_prefix", "answer", "max_new_tokens", "predicted_answer", "compression_ratio", "score",
)  # fmt: skip
NO_PRESS = "no_press"  # what kvpress calls the full cache
STRING_MATCH = "string_match"  # and both of RULER's metrics, of which each task has one


def record_files(evaluation: Evaluation) -> dict[str, bytes]:
    """Return what every method replied, in files of a folder of its own.

    Each has `predictions.csv`, a row per reply in the order of the examples; `metrics.json`, scores in percent by
    task; `config.yaml`, what was run. The ratio of a method without one is what it held less than the full cache.
    """
    samples = {sample.place: sample for sample in evaluation.samples}
    full = evaluation.held[FULL].entries
    files: dict[str, bytes] = {}
    for method in evaluation.methods:
        ratio = method.size.ratio if method.size is not None else None
        if ratio is None:
            ratio = 1 - evaluation.held[method.label].entries / full
        rows: list[tuple[Any, ...]] = []
        for encoded in evaluation.encoded:
            for prompt in encoded.prompts:
                for question in prompt.questions:
                    query = question.query
                    sample = samples[encoded.task.name, prompt.key, question.number, method.label]
                    rows.append(
                        (encoded.task.name, query.question, query.prefix, list(query.answers), query.max_new_tokens,
                         sample.reply, ratio, sample.score)
                    )  # fmt: skip
        config = _config(evaluation, method, ratio)
        place = "__".join(_parts(config))
        if f"{place}/{METRICS_FILE}" in files:  # a ratio that differs in its later digits, say
            place += f"__{method.label.replace('/', '--')}"
        text = io.StringIO(newline="")  # texts as they are: a spreadsheet may compute what looks like a formula
        csv.writer(text, lineterminator="\n").writerows([PREDICTION_COLUMNS, *rows])
        files[f"{place}/{PREDICTIONS}"] = text.getvalue().encode("utf-8", "backslashreplace")
        files[f"{place}/{METRICS_FILE}"] = _json(_metrics(evaluation, method.label))
        files[f"{place}/{SETTINGS_FILE}"] = _json(config)  # which is YAML, too
    return files


def _config(evaluation: Evaluation, method: ReadyMethod, ratio: float) -> dict[str, Any]:
    """Return what was run, by the names of kvpress' configuration, and what kvsearch knows besides."""
    dataset, data_dir = _dataset([encoded.task for encoded in evaluation.encoded])
    name = evaluation.loaded.name
    return {
        "dataset": dataset,
        "data_dir": data_dir,
        "model": Path(name).name if Path(name).exists() else name,
        "press_name": NO_PRESS if method.name == FULL else method.name,
        "compression_ratio": ratio,
        "query_aware": evaluation.split.protocol == QUESTION_AWARE,
        "seed": evaluation.split.seed,
        "press_init_command": json.dumps(method.definition, sort_keys=True),
        "samples_per_task": evaluation.split.samples,
        "evaluated_by": read_package_version(),
    }


def _parts(config: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of the folder's name, as kvpress has them."""
    yield config["dataset"]
    if config["data_dir"]:
        yield config["data_dir"]
    yield config["model"].replace("/", "--")
    yield config["press_name"].replace("/", "--")
    yield f"{config['compression_ratio']:.2f}"
    if config["query_aware"]:
        yield "query_aware"


def _dataset(tasks: list[Task]) -> tuple[str, str]:
    """Return what kvpress would call the data: of RULER with its length, which is the folder of what was drawn."""
    if all(isinstance(task, RulerTask | DrawnRulerTask) for task in tasks):
        places = set()
        for task in tasks:
            if isinstance(task, RulerTask):
                places.add(str(task.length))
            elif isinstance(task, DrawnRulerTask):
                source = Path(str(task.source)).resolve()
                places.add(source.name if source.is_dir() else source.parent.name)
        return "ruler", "+".join(sorted(places))
    names = {str(getattr(task, "benchmark", task.category)) for task in tasks}
    return "+".join(sorted(name.lower().replace(" ", "-").replace("/", "-") for name in names)), ""


def _metrics(evaluation: Evaluation, label: str) -> dict[str, dict[str, float]]:
    """Return the mean score of each task in percent under the name of its metric."""
    replies = group_by_key((sample for sample in evaluation.samples if sample.method == label), attrgetter("task"))
    metrics = {encoded.task.name: encoded.task.metric for encoded in evaluation.encoded}
    return {
        task: {
            STRING_MATCH if metrics[task].startswith(STRING_MATCH) else metrics[task]: round(
                100 * math.fsum(sample.score for sample in of_task) / len(of_task), 2
            )
        }
        for task, of_task in replies.items()
    }


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=4) + "\n").encode()
