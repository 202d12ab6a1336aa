"""What there is to know about the tasks before one is chosen: category, metric, and what they need from where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvsearch.tasks import gsm8k, jsonl, niah, splits
from kvsearch.tasks.catalog import find_entries, flag
from kvsearch.tasks.entries import ENTRIES, GSM8K, JSONL, LONGBENCH, NEEDLE, RULER, SYNTHETIC, Entry, own_file
from kvsearch.tasks.longbench.specs import SPECS
from kvsearch.tasks.longbench.task import REPOSITORY
from kvsearch.tasks.metrics import NEEDS
from kvsearch.tasks.metrics.packages import PACKAGES
from kvsearch.tasks.ruler import RulerTask
from kvsearch.tasks.ruler.task import QA_FORMATS
from kvsearch.tasks.synthetic.suite import SPLITS as SYNTHETIC_SPLITS
from kvsearch.tasks.synthetic.suite import SyntheticTask

GENERATED, STORY, YOURS, FILE = "generated", "generated in a story, or --haystack", "your file", "FILE"
WITH_ALL: Final = (*splits.SPLITS, splits.ALL)


@dataclass(frozen=True)
class TaskFacts:
    """One task. `source` says where its texts come from, `needs` what file a user must bring (empty: none).

    `packages` are those that its metric needs, as pip calls them; `options` are those that it reads, as on the command
    line. `split` is the default one of `splits`.
    """

    spec: str
    category: str
    metric: str
    source: str
    needs: str
    packages: tuple[str, ...]
    options: tuple[str, ...]
    split: str
    splits: tuple[str, ...]


def describe_tasks(spec: str | None = None) -> list[TaskFacts]:
    """Return the facts about the tasks of a spec, or about all there are; UsageError for an unknown kind or name."""
    entries = [*ENTRIES.values(), own_file(FILE)] if spec is None else find_entries(spec)
    return [_KINDS[entry.kind](entry) for entry in entries]


def _facts(
    entry: Entry,
    category: str,
    metric: str,
    source: str,
    needs: str = "",
    split: str = splits.ALL,
    known: tuple[str, ...] = WITH_ALL,
) -> TaskFacts:
    packages = tuple(PACKAGES[module] for module in NEEDS.get(metric, ()))
    return TaskFacts(entry.spec, category, metric, source, needs, packages, tuple(map(flag, entry.reads)), split, known)


def _synthetic(entry: Entry) -> TaskFacts:
    category, split = SyntheticTask.category, SyntheticTask.split
    return _facts(entry, category, "exact", GENERATED, split=split, known=SYNTHETIC_SPLITS)


def _ruler(entry: Entry) -> TaskFacts:
    if entry.needs is not None:
        needs = f"{flag(entry.needs)} {FILE}, {QA_FORMATS[entry.name][0]} JSON"
        return _facts(entry, "RULER QA", "string_match_part", YOURS, needs, RulerTask.split)
    source = STORY if "haystack" in entry.reads else GENERATED
    return _facts(entry, RulerTask(entry.name).category, "string_match_all", source, split=RulerTask.split)


def _longbench(entry: Entry) -> TaskFacts:
    spec = SPECS[entry.name.removesuffix("_e")]
    return _facts(entry, spec.category, spec.metric, f"{REPOSITORY}, or --data")


def _gsm8k(entry: Entry) -> TaskFacts:
    task = gsm8k.Gsm8kTask
    return _facts(entry, task.category, task.metric, f"{gsm8k.REPOSITORY}, or --data")


def _niah(entry: Entry) -> TaskFacts:
    return _facts(entry, niah.NiahTask.category, niah.NiahTask.metric, STORY)


def _jsonl(entry: Entry) -> TaskFacts:
    needs = f"{FILE}, rows with context, question, answers; they may name category and metric"
    return _facts(entry, jsonl.CATEGORY, jsonl.JsonlRow.model_fields["metric"].default, YOURS, needs)


_KINDS: Final[dict[str, Callable[[Entry], TaskFacts]]] = {
    SYNTHETIC: _synthetic, RULER: _ruler, LONGBENCH: _longbench, GSM8K: _gsm8k, NEEDLE: _niah, JSONL: _jsonl,
}  # fmt: skip
