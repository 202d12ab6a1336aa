"""No split of any job has two prompts of one text in two parts, but for worked examples, which all prompts share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.calibration.data import CalibrationData
from kvsearch.calibration.probe.contexts import split_contexts
from kvsearch.calibration.prompts import encode_prompts
from kvsearch.calibration.tables import FOLDS, assign_folds
from kvsearch.core.errors import UsageError
from kvsearch.models.loading import LoadedModel
from kvsearch.selection.splits import divide_contexts, list_texts, refuse_shared
from kvsearch.tasks.encode import TaskPrompts, encode_tasks
from tests import tiny

TEXTS = tiny.calibration_data(*[60] * 8).contexts
ROWS = tiny.listed(*[(44, 1)] * 8).rows
texts_of_prompts = st.lists(st.integers(0, 7), min_size=1, max_size=12)
model = pytest.fixture(scope="module")(lambda: tiny.loaded())


def data_about(texts: Sequence[int]) -> CalibrationData:
    """A context about each of these texts; more white space does not make another one."""
    contexts = [replace(TEXTS[text], text=TEXTS[text].text + " " * place) for place, text in enumerate(texts)]
    return CalibrationData("drawn", " {question}", tuple(contexts), "0" * 64)


def prompts_about(model: LoadedModel, **tasks: Sequence[int]) -> list[TaskPrompts]:
    """Tasks whose examples are about these texts, and have their numbers for keys."""
    rows = {name: [replace(ROWS[text], key=f"{n}") for n, text in enumerate(texts)] for name, texts in tasks.items()}
    return encode_tasks(model, [tiny.Listed(name, tuple(each)) for name, each in rows.items()], 99)


def apart(parts: Iterable[Iterable[object]]) -> bool:
    return not any(one & other for one, other in combinations(map(set, parts), 2))


@given(texts_of_prompts, st.integers(0, 99))
def test_calibrations(model: LoadedModel, texts: list[int], seed: int) -> None:
    """Contexts of a ranking, and of folds that tables are checked on."""
    data = data_about(texts)
    assert apart(
        [[text for text, fold in zip(texts, assign_folds(data), strict=True) if fold == n] for n in range(FOLDS)]
    )
    prompts = encode_prompts(model, data)
    if len(set(texts)) < 3:
        with pytest.raises(UsageError, match=f"there are {len(set(texts))}: give at least 3"):
            split_contexts(prompts, seed)
    else:
        parts = split_contexts(prompts, seed)
        assert all(parts) and apart([[texts[prompt.context] for prompt in part] for part in parts])
        assert sorted(prompt.context for part in parts for prompt in part) == list(range(len(texts)))


def test_worked_examples_are_shared_by_all_parts(model: LoadedModel) -> None:
    shared = tuple(replace(TEXTS[0], recorded=(f"{n:064x}",)) for n in range(8))
    assert [
        len(part) for part in split_contexts(encode_prompts(model, replace(data_about([]), contexts=shared)), 0)
    ] == [
        6,
        1,
        1,
    ]


@given(texts_of_prompts, st.integers(0, 99))
def test_rounds_of_a_choice(model: LoadedModel, texts: list[int], seed: int) -> None:
    (task,) = encoded = prompts_about(model, task=texts)
    count = len(list_texts(task))
    rounds = divide_contexts(encoded, [[number] for number in range(1, count + 1)], seed)
    assert apart([[texts[int(prompt.key)] for prompt in part.prompts] for (part,) in rounds])
    assert sorted(int(prompt.key) for (part,) in rounds for prompt in part.prompts) == list(range(len(texts)))


@given(texts_of_prompts, texts_of_prompts)
def test_select_and_evolve_refuse_a_text_in_two_splits(model: LoadedModel, one: list[int], two: list[int]) -> None:
    parts = {"choice": [*one, 0, 1], "report": [*two, 6, 7]}
    splits = {name: prompts_about(model, one=texts) for name, texts in parts.items()}
    refusal = pytest.raises(UsageError, match="is in the choice and in the report split")
    with nullcontext() if apart(parts.values()) else refusal:
        refuse_shared(splits)
