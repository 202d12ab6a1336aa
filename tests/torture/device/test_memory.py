"""Memory, by the allocator's own count: what a prompt takes at most, and what happens where there is too little."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.benchmark import speed
from kvsearch.benchmark.capacity import require_memory
from kvsearch.benchmark.speed import Roofline, Workload, list_cache_kinds, make_program, measure, measure_peak_bytes
from kvsearch.calibration.polykv.layer_sweep import collect_needs
from kvsearch.calibration.polykv.measure import estimate_replay_bytes
from kvsearch.calibration.polykv.tree import Tree
from kvsearch.core.errors import EnvironmentFault, KvsearchWarning
from kvsearch.evaluation.answer import CompressedContext
from kvsearch.models.architecture import describe
from kvsearch.models.loading import LoadOptions, load
from kvsearch.plan import Phase, Size
from kvsearch.policies import create_policy, scoring
from kvsearch.runtime import PlanCache, Program, attach
from kvsearch.runtime.attention import NAME, use_attention
from kvsearch.runtime.program import estimate_memory, make_full_program
from kvsearch.runtime.replay.replay import Replays
from kvsearch.runtime.shared_prefill import read
from tests import tiny
from tests.calibration.polykv.test_layer_sweep import NAMES, batch, small, tried
from tests.families import build, prompts
from tests.torture.device.accelerator import backend, device, room

HERE = 1  # the device
LENGTH = 1024  # tokens
CHUNK = 2**16  # bytes of scratch that do not grow with the prompts


@pytest.fixture(scope="module")
def model() -> Any:
    made = build("llama", max_position_embeddings=2048, num_hidden_layers=6, num_key_value_heads=8, head_dim=32)
    return made.to(device(HERE))


CLOSE = {None: 1.15, 32: 1.1}  # times what is allocated that the arithmetic may say, by chunks


@pytest.mark.parametrize(
    ("policy", "decode", "lengths", "chunk"),
    [
        ("full", False, (1024,), 32),
        ("snapkv", False, (1024, 1024, 700), None),
        ("h2o", True, (1024,), None),
        ("h2o", True, (1024,), 32),
        ("keydiff", True, (1024, 1024, 700), None),
    ],
)
def test_what_prompts_and_replies_take_by_arithmetic(
    policy: str, decode: bool, lengths: tuple[int, ...], chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never less than what is allocated, and not much more; in the proportions of Llama-3.1-8B."""
    monkeypatch.setattr(scoring, "CHUNK_BYTES", CHUNK)
    dtype = torch.float32 if len(lengths) == 1 else torch.bfloat16
    shape = {"hidden_size": 256, "intermediate_size": 896, "head_dim": 32, "max_position_embeddings": 2048}
    model = build("llama", **shape).to(device(HERE), dtype)
    program = make_full_program(model)
    if policy != "full":
        phases: tuple[Phase, ...] = ("prefill", "decode") if decode else ("prefill",)
        tables = dict.fromkeys(phases, lambda _: np.full((4, 2), LENGTH // 8))
        program = Program.of_policy(model, create_policy(policy), tables)
    texts = [prompts(1, length)[0][0] for length in lengths]

    def answered() -> None:
        read(model, PlanCache(model, program), texts, set(), chunk).reply([8] * len(lengths))

    with use_attention(model, NAME):
        peak = measure_peak_bytes(model.device, answered)
    needs = estimate_memory(model, program, lengths, chunk, tokens=8)
    assert needs.weights == sum(parameter.nbytes for parameter in model.parameters())
    assert peak <= needs.total - needs.weights <= CLOSE[chunk] * peak


@pytest.mark.parametrize("together", [1, 2])
def test_replays_take_what_a_calibration_counts_on(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no pattern more, and of the one that takes most not much less, beside the scratch of chunks."""
    monkeypatch.setattr(scoring, "CHUNK_BYTES", CHUNK)
    model = build("llama", max_position_embeddings=1024, num_hidden_layers=2).to(device(HERE))
    what, prompts = tried(model, small(NAMES[:9]), 64), batch((500, (12,)), (450, (9,)), (490, (12,)))
    needs = dict.fromkeys(what.layers, collect_needs(what.policies, what.phases, ("cosine",)))
    expected = together * 3 * estimate_replay_bytes(describe(model), model.dtype.itemsize, 500, 12, 1)
    taken = {}
    with use_attention(model, NAME):
        tree = Tree(model, needs, *prompts.padded(model.device))
        after = prompts.continuations([(row, 0) for row in range(3)], model.device)
        with tree.baseline_pass(after.tokens, after.rows) as continuations:
            layers = [continuations[index] for index in what.layers[:together]]
            for item in what.of_layer:
                rules = what.rules(item)
                Replays(layers).under(*rules)  # scores and ranks of the prompts are kept, and counted elsewhere
                taken[item] = measure_peak_bytes(model.device, lambda rules=rules: Replays(layers).under(*rules))  # type: ignore[misc]
    assert max(taken.values()) <= expected + CHUNK
    assert max(taken.values()) >= 0.7 * expected


def test_a_plan_that_does_not_fit_is_refused_before_it_starts(model: Any) -> None:
    program = Program.uniform(model, create_policy("snapkv"), lambda length: length // 2)
    ids, mask = prompts(2, LENGTH, device=str(model.device))
    needs = estimate_memory(model, program, [LENGTH] * 2)
    with room(needs.total - needs.weights - 10**7, HERE), attach(model, program) as planned:
        backend().reset_peak(HERE)
        before = backend().peak_bytes(HERE)
        with pytest.raises(
            EnvironmentFault, match=r"needs 0\.\d\d GB .* 2 prompts of up to 1,024 tokens.* 0\.01 GB are"
        ):
            planned.generate(ids, attention_mask=mask, max_new_tokens=1)
        assert backend().peak_bytes(HERE) == before


def test_a_bench_takes_what_it_is_refused_for(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All caches at once, those that evict while decoding twice; `_peak` sets the count back, with no cache there."""
    monkeypatch.setattr(speed, "_measure_peak", lambda *_: 0)
    monkeypatch.setattr(scoring, "CHUNK_BYTES", CHUNK)
    work = Workload(3, LENGTH // 2, 4, 1)
    size = Size(LENGTH // 4, None)
    phases: tuple[tuple[Phase, ...], ...] = (("prefill",), ("prefill", "decode"))
    programs = {str(each): make_program(model, create_policy("snapkv"), size, each) for each in phases}
    needed = require_memory(model, programs, work, model.device)["needed_bytes"]
    kinds = list_cache_kinds(model, programs, work.length + work.steps)
    taken = measure_peak_bytes(model.device, lambda: measure(model, kinds, work, Roofline(1.0, 1.0)))
    assert taken <= needed <= 1.3 * taken


def test_a_context_that_does_not_fit() -> None:
    loaded, ids = load("bundled", LoadOptions(device=str(device(HERE)))), torch.full((1, 900), 7)
    with room(2**18, HERE), pytest.raises(EnvironmentFault, match=r"for a prompt of 900 tokens.*are missing"):
        CompressedContext.read(loaded, None, ids)
    assert CompressedContext.read(loaded, None, ids).bytes > 2**18


def test_a_batch_that_is_too_large_is_halved() -> None:
    loaded = tiny.wrap(build("llama", vocab_size=len(tiny.WORDS)).to(device(HERE)))
    program = Program.uniform(loaded.model, create_policy("snapkv", {"window": 4}), lambda length: length // 2)
    programs, tasks = {"a": program, "b": program}, [tiny.listed((60, 2), (70, 1), (65, 2), (50, 1))]
    everything = measure_peak_bytes(loaded.device, lambda: tiny.run(loaded, programs, tasks, 4, 4))
    expected = tiny.run(loaded, programs, tasks, 4, 4)
    with (
        room(int(0.45 * everything), HERE),
        pytest.warns(KvsearchWarning, match="too short for 4 contexts at a time"),
    ):
        found = tiny.run(loaded, programs, tasks, 4, 4)
    assert [(one.place, one.reply, one.score) for one in found] == [
        (one.place, one.reply, one.score) for one in expected
    ]
    with room(everything // 40, HERE), pytest.raises((EnvironmentFault, torch.OutOfMemoryError)):
        tiny.run(loaded, programs, tasks, 4, 1)
