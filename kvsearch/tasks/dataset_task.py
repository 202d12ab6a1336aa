"""What the datasets of LongBench and InfiniteBench have in common: rows from a source, asked by a template."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from kvsearch.tasks.base import Example, Query, TokenCount
from kvsearch.tasks.metrics import METRICS, find_metric
from kvsearch.tasks.prompts import PLACE
from kvsearch.tasks.splits import ALL, SHARES, Shares, check_split, draw
from kvsearch.tasks.templates import Template


class Settings(Protocol):
    """Settings of a dataset: the group that tables average it in, and what scores its replies."""

    @property
    def category(self) -> str: ...

    @property
    def metric(self) -> str: ...


@dataclass(frozen=True)
class DatasetTask(ABC):
    """A dataset by its name, where its rows are, the prompts to use in place of ours, and a part of its rows."""

    name: str
    source: str | Path = ""
    revision: str | None = None
    prompts: Path | None = None
    split: str = ALL
    shares: Shares = SHARES

    def __post_init__(self) -> None:
        """Find out what cannot be used before rows are read."""
        check_split(self.split, self.shares)
        find_metric(self.metric)
        _ = self.template

    @property
    @abstractmethod
    def spec(self) -> Settings:
        """The settings of the dataset."""

    @cached_property
    @abstractmethod
    def template(self) -> Template:
        """The prompt of the dataset."""

    @cached_property
    @abstractmethod
    def rows(self) -> tuple[Example, ...]:
        """All examples of the split."""

    @property
    def prompt(self) -> str:
        return self.template.separator + PLACE

    @property
    def metric(self) -> str:
        return self.spec.metric

    @property
    def category(self) -> str:
        return self.spec.category

    def examples(self, samples: int, seed: int, count: TokenCount | None = None) -> list[Example]:  # noqa: ARG002
        """Return up to `samples` rows, drawn without replacement if the split has more."""
        return draw(self.rows, samples, seed)

    def score(self, reply: str, query: Query) -> float:
        """Return the dataset's metric, best of the answers."""
        return METRICS[self.metric](reply, query)

    @property
    def _where(self) -> str:
        return f"{self.name} of {self.source}"
