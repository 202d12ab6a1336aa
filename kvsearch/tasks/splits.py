"""Disjoint splits of a task's examples, and samples drawn from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain

from kvsearch.core.errors import UsageError
from kvsearch.core.items import Item, group_by_key
from kvsearch.core.naming import require_known

Shares = tuple[float, float, float]

ALL = "all"
SPLITS = ("train", "select", "report")
SHARES: Shares = (0.2, 0.2, 0.6)  # of benchmarks, which are reported
OWN_SHARES: Shares = (0.4, 0.35, 0.25)  # of a user's own questions, which a decision is made by
# one shuffle for every run: were it the run's own seed, what one run trains on would be what another reports
_SHUFFLE = "kvsearch/split"


def check_split(split: str) -> None:
    """Raise UsageError unless `split` is train, select, report or all."""
    require_known("split", split, (*SPLITS, ALL))


def group_by_text(texts: Iterable[Hashable]) -> list[list[int]]:
    """Group the indices of equal texts, in the order in which the texts first occur.

    No split of anything divides such a group: what is fitted on one question about a text knows the text, and is not
    judged on another question about it.
    """
    known = list(texts)
    return list(group_by_key(range(len(known)), lambda place: known[place]).values())


def select_split(
    items: Sequence[Item], split: str, group: Callable[[Item], Hashable], source: str, shares: Shares = SHARES
) -> list[Item]:
    """Return the items of one split in their order; the split "all" has every item.

    The three splits are disjoint and cover the items, are the same in every run, and never divide a `group`, such as
    the questions about one document. `shares` are of the groups; `source` is where the items are from, for messages.

    Raises:
        UsageError: no such split, or one that gets nothing.
    """
    check_split(split)
    if split == ALL:
        return list(items)
    from kvsearch.plan.rounding import largest_remainder  # imports numpy, which a list of tasks does without

    groups = group_by_text(map(group, items))
    random.Random(_SHUFFLE).shuffle(groups)
    sizes = largest_remainder([share * len(groups) for share in shares], len(groups)).tolist()
    index = SPLITS.index(split)
    start = sum(sizes[:index])
    chosen = sorted(chain.from_iterable(groups[start : start + sizes[index]]))
    if not chosen:
        divided = " : ".join(map(str, shares))
        raise UsageError(
            f"split {split!r} of {source} is empty: contexts are divided {divided} into train, select and report, and "
            f"it has {len(groups)} in all; give more"
        )
    return [items[place] for place in chosen]


def draw_items(items: Sequence[Item], samples: int, seed: int) -> list[Item]:
    """Draw `samples` items without replacement; return all of them in their order if there are no more.

    Under one seed, fewer samples are some of more.
    """
    if samples >= len(items):
        return list(items)
    return random.Random(seed).sample(list(items), len(items))[:samples]
