"""Every task that has a name, how it is made, and which options it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvsearch.tasks.base import Task
from kvsearch.tasks.gsm8k import Gsm8kTask
from kvsearch.tasks.infinitebench import INFINITEBENCH_LAVA, INFINITEBENCH_TASKS, InfiniteBenchTask
from kvsearch.tasks.jsonl import JsonlTask
from kvsearch.tasks.longbench import LONGBENCH_E, LONGBENCH_ENGLISH, LONGBENCH_TASKS, LongBenchTask
from kvsearch.tasks.niah import NiahTask
from kvsearch.tasks.ruler import RULER_TASKS, RulerTask
from kvsearch.tasks.ruler.needles import NIAH
from kvsearch.tasks.synthetic.suite import FORMS, SUITES, SyntheticTask

SYNTHETIC, RULER, LONGBENCH, INFINITEBENCH = "synthetic", "ruler", "longbench", "infinitebench"
GSM8K, NEEDLE, JSONL = "gsm8k", "niah", "jsonl"
KINDS: Final = (SYNTHETIC, RULER, LONGBENCH, INFINITEBENCH, GSM8K, NEEDLE, JSONL)
QA_OPTIONS: Final = {"qa_1": "squad", "qa_2": "hotpot"}  # the options that bring the files of RULER's qa tasks
NO_QA: Final = f"{RULER}:no-qa"

_GENERATED: Final = {"lengths": "length", "split": "split"}
_ROWS: Final = {"data": "source", "data_revision": "revision", "split": "split"}


@dataclass(frozen=True)
class Entry:
    """A task by its spec. `reads` maps options to the parameters of `make` that they set; one of them may be needed."""

    spec: str
    make: Callable[..., Task]
    reads: Mapping[str, str]
    needs: str | None = None

    @property
    def kind(self) -> str:
        return self.spec.partition(":")[0]

    @property
    def name(self) -> str:
        """The name within the kind; empty where the kind is one task."""
        return self.spec.partition(":")[2]


def own_file(path: str) -> Entry:
    """Return the task of a user's file."""
    return Entry(f"{JSONL}:{path}", partial(JsonlTask.load, path), {"split": "split"})


def _entries() -> Iterator[Entry]:
    for name in FORMS:
        yield Entry(f"{SYNTHETIC}:{name}", partial(SyntheticTask, name), _GENERATED)
    for name in RULER_TASKS:
        essay, file = name in NIAH and NIAH[name].haystack == "essay", QA_OPTIONS.get(name)
        reads = _GENERATED | ({"haystack": "haystack"} if essay else {}) | ({file: "qa_file"} if file else {})
        yield Entry(f"{RULER}:{name}", partial(RulerTask, name), reads, file)
    for name in (*LONGBENCH_TASKS, *LONGBENCH_E):
        yield Entry(f"{LONGBENCH}:{name}", partial(LongBenchTask, name), _ROWS | {"prompts": "prompts"})
    for name in INFINITEBENCH_TASKS:
        yield Entry(f"{INFINITEBENCH}:{name}", partial(InfiniteBenchTask, name), _ROWS | {"prompts": "prompts"})
    yield Entry(GSM8K, Gsm8kTask, _ROWS | {"shots": "shots", "shots_from": "train", "metric": "metric"})
    yield Entry(NEEDLE, NiahTask, {name: name for name in ("lengths", "depths", "haystack", "metric", "split")})


def _specs(kind: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{kind}:{name}" for name in names)


ENTRIES: Final = {entry.spec: entry for entry in _entries()}
SETS: Final[dict[str, tuple[str, ...]]] = {
    SYNTHETIC: _specs(SYNTHETIC, SUITES["core"]),
    **{f"{SYNTHETIC}:{suite}": _specs(SYNTHETIC, names) for suite, names in SUITES.items()},
    RULER: _specs(RULER, RULER_TASKS),
    NO_QA: _specs(RULER, (name for name in RULER_TASKS if name not in QA_OPTIONS)),
    LONGBENCH: _specs(LONGBENCH, LONGBENCH_TASKS),
    f"{LONGBENCH}:english": _specs(LONGBENCH, LONGBENCH_ENGLISH),
    f"{LONGBENCH}:e": _specs(LONGBENCH, LONGBENCH_E),
    INFINITEBENCH: _specs(INFINITEBENCH, INFINITEBENCH_TASKS),
    f"{INFINITEBENCH}:lava": _specs(INFINITEBENCH, INFINITEBENCH_LAVA),
}  # specs that stand for several tasks
