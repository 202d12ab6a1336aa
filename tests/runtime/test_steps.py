"""Decode steps that are captured under `generate`: the same tokens, and where that cannot be, the usual steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported

from kvsearch.core import errors
from kvsearch.core.errors import KvsearchWarning
from kvsearch.policies import create_policy
from kvsearch.runtime import Program, attach
from kvsearch.runtime.attach import PlannedModel
from kvsearch.runtime.decode import steps
from kvsearch.runtime.decode.steps import CudaGraphs
from kvsearch.runtime.stock import CACHE
from tests.families import DEVICES, build, prompts
from tests.runtime.policies import SMALL, for_model, policies_of
from tests.runtime.recorder import Recorder, capturing

TOKENS = 20
BUDGETS = np.array([[6, 11]])


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_said", set())


@cache
def model(family: str = "llama") -> Any:
    return build(family) if family != "llama" else build("llama", num_hidden_layers=1)


def planned(policy: str = "h2o", *, decode: bool = True, family: str = "llama", **options: Any) -> PlannedModel:
    phases = ("prefill", "decode") if decode else ("prefill",)
    if family != "llama":
        return attach(model(family), Program.uniform(model(family), create_policy(policy), lambda _: 9), **options)
    program = Program.of_policy(model(), create_policy(policy), dict.fromkeys(phases, lambda _: BUDGETS))
    return attach(model(), program, **options)


def say(planned_model: PlannedModel, batch: int = 2, **changes: Any) -> Tensor:
    ids, mask = prompts(batch, 20, pads=5)
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, **changes}
    torch.manual_seed(0)
    with planned_model:
        made: Tensor = planned_model.generate(ids, attention_mask=mask, **options)
    return made


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Let steps be captured by a recorder."""
    recorder = Recorder()
    with capturing(recorder):
        yield recorder


class Waiting(Recorder):
    """The device is waited for in the first steps that are run."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def run(self, step: Callable[[], Any]) -> Any:
        self.waited = self.times > self.log.count("run")
        return super().run(step)


def usual(**options: Any) -> Recorder:
    """Steps that are not captured, and which tokens come out all the same."""
    policy = {name: options.pop(name) for name in ("decode", "family", "exact") if name in options}
    expected = say(planned(**policy), **options)
    with recorded() as recorder:
        assert torch.equal(say(planned(**policy), **options), expected)
    return recorder


@pytest.mark.filterwarnings("error::kvsearch.core.errors.KvsearchWarning")
class TestCaptured:
    @pytest.mark.parametrize("decode", [False, True])
    def test_room_that_runs_out_is_made_anew(self, decode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Graphs of what was there before are not used any more."""
        monkeypatch.setattr(steps, "MAX_ROOM", 6)
        expected = say(planned("full", decode=decode))
        with recorded() as recorder:
            run = planned("full", decode=decode)
            assert torch.equal(say(run), expected)
        assert recorder.log.count("captured") >= (3 if not decode else 1)
        assert recorder.log.count("dropped") >= recorder.log.count("captured")  # none into a pool that is in use
        assert recorder.log.count("replayed") > TOKENS // 2

    @pytest.mark.parametrize("decode", [False, True])
    def test_a_conversation_goes_on(self, decode: bool) -> None:
        """What was captured of one turn leaves the cache as others leave it: to be cropped, saved and continued."""
        found = []
        for first, second in ((True, True), (True, False), (False, False)):
            run, ids = planned(decode=decode), prompts(1, 17)[0]
            for captured in (first, second):
                ids = torch.cat([ids, prompts(1, 3, seed=2)[0]], 1)
                given = {} if run.cache is None else {CACHE: run.cache}
                with capturing(Recorder() if captured else None), run:
                    ids = run.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, **given)
            if not decode:
                run.cache.crop(-2)
            found.append((ids.tolist(), run.cache.entries().tolist(), run.cache.kept_positions(0)))
        assert found[0] == found[1] == found[2]


class TestCompiled:
    """`attach(..., compile=True)`: what torch.compile makes is called in place of the model, captured or not."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Stands for what compiles: how often what it made was called."""
        made: list[str] = []

        def compiled(call: Callable[..., Any], fullgraph: bool) -> Callable[..., Any]:
            assert fullgraph
            return lambda **given: (made.append("called"), call(**given))[1]

        monkeypatch.setattr(torch, "compile", compiled)
        return made

    @pytest.mark.filterwarnings("error::kvsearch.core.errors.KvsearchWarning")
    def test_replies_are_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        run = planned(compile=True)
        expected = say(planned())
        assert torch.equal(say(run), expected)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert 0 < graphs <= 2
        assert torch.equal(say(run), expected)  # another cache takes what was compiled
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs

    def test_what_is_captured_was_compiled(self, calls: list[str]) -> None:
        expected = say(planned())
        with recorded() as recorder:
            assert torch.equal(say(planned(compile=True)), expected)
        assert len(calls) == recorder.log.count("run") + recorder.log.count("captured") > 0
        assert recorder.log.count("replayed") > TOKENS // 2

    def test_a_compiler_that_fails_is_said_and_done_without(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fault = Unsupported("no C++ compiler\nis here\n\nSet TORCHDYNAMO_VERBOSE=1")
        monkeypatch.setattr(torch, "compile", lambda *_, **__: Mock(side_effect=fault))
        expected = say(planned())
        with pytest.warns(KvsearchWarning, match=r"decode steps are not compiled: no C\+\+ compiler is here$") as said:
            assert torch.equal(say(planned(compile=True)), expected)
        assert len(said) == 1

    def test_steps_that_change_shape_are_not_compiled(self, calls: list[str]) -> None:
        with pytest.warns(KvsearchWarning, match="not compiled: `exact` attention"):
            say(planned(decode=False, exact=True, compile=True))
        assert usual(max_new_tokens=8, min_new_tokens=8).log == []  # too few to be worth it
        say(planned(compile=True), max_new_tokens=8, min_new_tokens=8)
        assert calls == []


class TestNotCaptured:
    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"num_beams": 2}, "sequences are rearranged"),
            ({"prompt_lookup_num_tokens": 3, "decode": False, "batch": 1}, "several tokens come at a time"),
            ({"output_hidden_states": True}, "output_hidden_states asks for would be overwritten"),
            ({"family": "gemma3"}, "leaves alone have caches that move"),
        ],
    )
    def test_the_reason_is_said_once(self, options: dict[str, Any], reason: str) -> None:
        with pytest.warns(KvsearchWarning, match=reason) as said:
            recorder = usual(**options)
            usual(**options)
        assert "captured" not in recorder.log
        assert len([one for one in said if "without CUDA graphs" in str(one.message)]) == 1

    def test_a_step_that_cannot_be_captured_is_run(self) -> None:
        broken, expected = Recorder(), say(planned())
        fault = RuntimeError("operation not permitted when stream is capturing\nand more")
        broken.capture = Mock(side_effect=fault)  # type: ignore[method-assign]
        with capturing(broken), pytest.warns(KvsearchWarning, match=r"capturing\)$"):
            assert torch.equal(say(planned()), expected)

    def test_a_step_that_waits_for_the_device_is_not_captured(self) -> None:
        """A first step may wait for what is made once."""
        once, always, expected = Waiting(1), Waiting(TOKENS), say(planned())
        with capturing(once):
            assert torch.equal(say(planned()), expected)
        with capturing(always), pytest.warns(KvsearchWarning, match="waits for the device in every step"):
            assert torch.equal(say(planned()), expected)
        assert "captured" in once.log
        assert "captured" not in always.log

    def test_a_model_that_looks_at_lengths_is_not_replayed(self) -> None:
        """Its code would go on with the length of the step that was captured."""

        def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            kwargs[CACHE].get_seq_length()

        hook = model().register_forward_pre_hook(look, with_kwargs=True)
        with hook, pytest.warns(KvsearchWarning, match="asks how long"):
            assert "captured" not in usual().log


class TestStandIn:
    """What is asked of CUDA, by a stand-in that refuses as CUDA does."""

    @pytest.fixture
    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        state = SimpleNamespace(stream="main", mode=0, pools=iter(range(9)), ended=[], broken=True)
        side = SimpleNamespace(device=0, device_index=0, wait_stream=lambda _: None)

        @contextmanager
        def stream(chosen: Any) -> Iterator[None]:
            before, state.stream = state.stream, chosen
            yield
            state.stream = before

        @contextmanager
        def graph(_: Any, pool: int, stream: Any, capture_error_mode: str) -> Iterator[None]:
            before, state.stream = state.stream, stream
            yield
            if state.broken:  # where the end of capturing raises nothing is put back
                raise RuntimeError("operation failed due to a previous error during capture")
            state.stream = before

        for name, made in {
            "Stream": lambda _: side,
            "graph_pool_handle": lambda: next(state.pools),
            "stream": stream,
            "graph": graph,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "current_stream": lambda _: SimpleNamespace(wait_stream=lambda _: None, name=state.stream),
            "set_stream": lambda chosen: setattr(state, "stream", chosen.name),
            "get_sync_debug_mode": lambda: state.mode,
            "set_sync_debug_mode": lambda mode: setattr(state, "mode", mode),
        }.items():
            monkeypatch.setattr(torch.cuda, name, made)
        monkeypatch.setattr(
            torch._C, "_cuda_endAllocateToPool", lambda *place: state.ended.append(place), raising=False
        )
        return state

    def test_a_capture_that_fails_leaves_the_stream_as_it_was(self, cuda: Any) -> None:
        graphs = CudaGraphs(torch.device("cpu"))
        with pytest.raises(RuntimeError, match="during capture"):
            graphs.capture(lambda: None)
        assert (cuda.stream, cuda.ended) == ("main", [(0, 0)])
        cuda.broken = False
        assert graphs.capture(lambda: 3)() == 3
        assert cuda.stream == "main"
        graphs.drop()
        assert graphs.pool == 1

    def test_a_step_that_waits_is_found_out(self, cuda: Any) -> None:
        graphs = CudaGraphs(torch.device("cpu"))

        def step(message: str) -> int:
            assert cuda.mode == "warn"
            warnings.warn(message, UserWarning, stacklevel=1)
            return 5

        for message, waited in (
            ("called a synchronizing CUDA operation (Triggered internally)", True),
            ("else", False),
        ):
            with warnings.catch_warnings(record=True) as said:
                assert graphs.run(lambda message=message: step(message)) == 5  # type: ignore[misc]
            assert graphs.waited == waited
            assert [str(one.message) for one in said] == ([] if waited else ["else"])
            assert (cuda.stream, cuda.mode) == ("main", 0)


@pytest.mark.cuda
@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a CUDA device")
@pytest.mark.parametrize("name", policies_of())
def test_a_gpu_replays_every_policy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests/torture/device has it with a stand-in: here the graphs are those of CUDA."""
    replayed: list[str] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replayed.append(name), replay(graph)))
    there, policy = build("llama", "cuda", num_hidden_layers=2), for_model(SMALL[name])
    ids, mask = prompts(2, 20, pads=5, device="cuda")
    for phases in (("prefill",), ("prefill", "decode"))[: 1 if policy.no_decode_rule() else 2]:
        program = Program.of_policy(there, policy, dict.fromkeys(phases, lambda _: np.array([[9, 9], [6, 13]])))
        made = []
        for graphs in (True, False):
            with attach(there, program, graphs=graphs) as run:
                made.append(run.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False))
        assert torch.equal(*made)
    assert replayed
