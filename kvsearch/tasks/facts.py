"""What there is to know about the tasks before one is chosen: category, metric, and what they need from where."""

from __future__ import annotations

from dataclasses import dataclass

from kvsearch.tasks import gsm8k, jsonl, splits
from kvsearch.tasks.catalog import find_entries, flag
from kvsearch.tasks.entries import ENTRIES, GSM8K, INFINITEBENCH, LONGBENCH, NEEDLE, RULER, SYNTHETIC, Entry, own_file
from kvsearch.tasks.gsm8k import Gsm8kTask
from kvsearch.tasks.infinitebench import specs as infinitebench
from kvsearch.tasks.infinitebench.task import REPOSITORY as INFINITEBENCH_REPOSITORY
from kvsearch.tasks.longbench.specs import SPECS
from kvsearch.tasks.longbench.task import REPOSITORY
from kvsearch.tasks.metrics import NEEDS
from kvsearch.tasks.metrics.packages import PACKAGES
from kvsearch.tasks.niah import NiahTask
from kvsearch.tasks.ruler import RulerTask
from kvsearch.tasks.ruler.task import QA_FORMATS
from kvsearch.tasks.synthetic.suite import SPLITS as SYNTHETIC_SPLITS
from kvsearch.tasks.synthetic.suite import SyntheticTask

GENERATED, STORY, YOURS, FILE = "generated", "generated in a story, or --haystack", "your file", "FILE"


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
    return list(map(_facts, [*ENTRIES.values(), own_file(FILE)] if spec is None else find_entries(spec)))


def _facts(entry: Entry) -> TaskFacts:
    needs, split, known = "", splits.ALL, (*splits.SPLITS, splits.ALL)
    if entry.kind == SYNTHETIC:
        category, metric, source = SyntheticTask(entry.name).category, "exact", GENERATED
        split, known = SyntheticTask.split, SYNTHETIC_SPLITS
    elif entry.kind == RULER and entry.needs is not None:
        category, metric, source, split = "RULER QA", "string_match_part", YOURS, RulerTask.split
        needs = f"{flag(entry.needs)} {FILE}, {QA_FORMATS[entry.name][0]} JSON"
    elif entry.kind == RULER:
        category, metric, split = RulerTask(entry.name).category, "string_match_all", RulerTask.split
        source = STORY if "haystack" in entry.reads else GENERATED
    elif entry.kind == LONGBENCH:
        dataset = SPECS[entry.name.removesuffix("_e")]
        category, metric, source = dataset.category, dataset.metric, f"{REPOSITORY}, or --data"
    elif entry.kind == INFINITEBENCH:
        settings = infinitebench.SPECS[entry.name]
        category, metric, source = settings.category, settings.metric, f"{INFINITEBENCH_REPOSITORY}, or --data"
    elif entry.kind == GSM8K:
        category, metric, source = Gsm8kTask.category, Gsm8kTask.metric, f"{gsm8k.REPOSITORY}, or --data"
    elif entry.kind == NEEDLE:
        category, metric, source = NiahTask.category, NiahTask.metric, STORY
    else:
        category, metric, source = jsonl.CATEGORY, jsonl.JsonlRow.model_fields["metric"].default, YOURS
        needs = f"{FILE}, rows with context, question, answers; they may name id, category and metric"
    packages = tuple(PACKAGES[module] for module in NEEDS.get(metric, ()))
    return TaskFacts(entry.spec, category, metric, source, needs, packages, tuple(map(flag, entry.reads)), split, known)
