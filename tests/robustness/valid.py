"""Valid files of every kind, to begin with: small ones, made in memory or kept in `seeds`.

Those in `seeds` are what commands wrote on the bundled model; a test says so when one is no longer read.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import save
from safetensors.torch import save as save_tensors

from kvsearch.evaluation.reply_store import ReplyStore
from kvsearch.evaluation.samples import Cost, Sample
from kvsearch.plan import Plan, PolicySpec, Profile, ProfileMetadata
from kvsearch.plan.canonical import canonical_json
from kvsearch.plan.contexts import ContextRecord, ContextSet, context_hash
from kvsearch.plan.profile import TableCheck, read_profile
from kvsearch.plan.yaml import plan_to_yaml
from kvsearch.resources import resource
from kvsearch.runs.identity import RunConfig
from kvsearch.search.executors import Job, JobOutcome
from kvsearch.search.ledger import SearchLedger
from tests.plan.builders import PROVENANCE, make_plan, metadata_dict, model_dict
from tests.policies.probes import ranking, zap_weights

SEEDS = Path(__file__).parent / "seeds"
IDENTITY = {"model weights": "ab", "data": "cd", "options": '{"a": 1}'}  # of samples
SHAPES = {"cosine": (2, 1, 3, 2), "relative_error": (2, 1, 3, 2), "entropy": (1, 3)}
SUMMED = (1, 3)


def stored(*names: str) -> list[bytes]:
    """Return files of the folder `seeds`."""
    return [(SEEDS / name).read_bytes() for name in names]


def records() -> ContextRecord:
    """What a plan says of contexts, in both of the ways to say it."""
    few = ContextSet.of([context_hash(f"context {number}") for number in range(3)], 4)
    many = ContextSet.of([context_hash(f"context {number}") for number in range(300)], 300)
    return ContextRecord(fitted=few, chosen=few.union(many), complete=False)


@lru_cache
def plans() -> list[Plan]:
    """Plans with one phase and with both, of fixed and proportional budgets, static and dynamic."""
    few = ContextSet.of([context_hash(f"context {number}") for number in range(3)], 4)
    known = ContextRecord(fitted=few, reported=few).model_dump(mode="json")
    many = records().model_dump(mode="json")
    return [
        _plan("snapkv", [[10, 6], None, [4, 12]], {"window": 4, "pooling": "max"}),
        _plan("knorm", [[40, 12], [20, 30]], provenance={**PROVENANCE, "contexts": known}),
        _plan("pyramidkv", [[12, 10]] * 4, {"window": 3}, length=None, scaling="fixed"),
        _plan("snapkv", [[12, 10]] * 2, {"window": 4}, allocation={"name": "adakv", "params": {"floor_share": 0.2}}),
        _plan("snapkv", [[16, 24]] * 3, {"window": 4}, decode={"layers": [
            _layer(name, [16, 24]) for name in ("h2o", "streaming", "tova")
        ]}),
        _plan("streaming", [[10, 6], [4, 12]], {"sinks": 2}, provenance={**PROVENANCE, "contexts": many}),
    ]  # fmt: skip


def _plan(policy: str, budgets: list[list[int] | None], params: dict[str, Any] | None = None, **changes: Any) -> Plan:
    layers = [None if budget is None else _layer(policy, budget, params) for budget in budgets]
    return make_plan(budgets, prefill={"layers": layers}, **changes)


def _layer(policy: str, budget: list[int], params: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"policy": {"name": policy, "params": params or {}}, "budget": budget}


@lru_cache
def plan_files() -> list[bytes]:
    """Plans as files."""
    return [canonical_json(plan) for plan in plans()]


@lru_cache
def plan_texts() -> list[bytes]:
    """Plans as YAML."""
    return [plan_to_yaml(plan).encode() for plan in plans()[:-1]]


@lru_cache
def table_profiles() -> list[bytes]:
    """Profiles with a table of local ratios: LU-KV's, with rivals, with checks, and those of dynamic rules."""
    names = ("lukv", "lukv-rivals", "cake", "cake-fit", "adakv")
    found = stored(*(f"{name}.safetensors" for name in names))
    checks = (TableCheck(ratio=0.8, contexts=12, table=0.5, even=0.4, low=-0.1, high=0.3, verdict="unproven"),)
    plain = read_profile(found[0], "lukv")
    checked = plain.metadata.model_copy(update={"checks": checks})
    return [*found, Profile(checked, plain.arrays).to_bytes()]


@lru_cache
def signal_profiles() -> list[bytes]:
    """Profiles of signals by pattern, of one phase and of both."""
    found = []
    for phases in (["prefill"], ["prefill", "decode"]):
        axes = {
            "patterns": [{"name": name, "params": {}} for name in ("snapkv", "streaming", "tova")],
            "phases": phases, "budgets": [16, 32], "protocol": "question-agnostic",
        }  # fmt: skip
        told = metadata_dict(method="polykv", signals=axes, length=200)
        told["provenance"] = {**told["provenance"], "method": "polykv", "settings": {"route": "cosine"}}
        rng, samples, layers = np.random.default_rng(0), 4, 2
        whole = (samples, 2, len(phases), layers, 3)
        arrays = {
            "cosine": rng.uniform(0.5, 1, whole), "relative_error": rng.uniform(0, 1, whole),
            "nll": rng.uniform(1, 2, whole), "full_nll": rng.uniform(1, 2, samples),
            "entropy": rng.uniform(0, 1, (samples, len(phases), layers)),
            "mean_entropy": rng.uniform(0, 3, (len(phases), layers)),
            "sample_tokens": np.full(samples, 9, np.int32), "sample_length": np.array([150, 200, 180, 190], np.int32),
            "sample_context": np.array([0, 0, 1, 1], np.int32),
        }  # fmt: skip
        found.append(Profile(ProfileMetadata.model_validate(told), arrays).to_bytes())
    return found


def _queries() -> dict[str, Any]:
    told = metadata_dict(method="query_statistics", layers=[0, 1, 2])
    return {**told, "provenance": {**told["provenance"], "settings": {"queries": 1200, "data": "tiny"}}}


@lru_cache
def query_profiles() -> list[bytes]:
    """Profiles of statistics of queries."""
    rng = np.random.default_rng(0)
    metadata = ProfileMetadata.model_validate(_queries())
    metadata = metadata.model_copy(update={"policy": PolicySpec(name="expected_attention")})
    arrays = {
        "query_mean": rng.normal(size=(3, 4, 8)).astype(np.float32),
        "query_cov": np.broadcast_to(np.eye(8, dtype=np.float32), (3, 4, 8, 8)),
        "query_abs": np.ones((3, 4, 4), np.float32),
    }
    return [Profile(metadata, {name: np.ascontiguousarray(one) for name, one in arrays.items()}).to_bytes()]


@lru_cache
def rankings(first: int = 0) -> list[bytes]:
    """Weights of fitted rankings, from the `first` on."""
    found = [ranking().to_bytes(), ranking(("key", "value", "value_norm"), size=17, layers=(0, 1), heads=2).to_bytes()]
    return found[first:]


@lru_cache
def query_banks() -> list[bytes]:
    """Weights of banks of queries."""
    rng, found = np.random.default_rng(1), []
    for even in (None, np.zeros((2, 2), np.float32)):
        told = metadata_dict(method="query_bank", layers=[0, 1], model=model_dict(layers=2, kv_heads=2, head_dim=4))
        told["policy"] = {"name": "query_bank", "params": {}}
        arrays = {"queries": rng.normal(size=(2, 2, 1, 3, 4)).astype(np.float32)}
        arrays |= {} if even is None else {"even": even}
        found.append(Profile(ProfileMetadata.model_validate(told), arrays).to_bytes())
    return found


@lru_cache
def zap_files() -> list[bytes]:
    """Weights of KVzap, of two maps a layer and of one."""
    return [save_tensors(zap_weights(2, 2, 6, hidden)) for hidden in (3, None)]


def zap_config() -> list[bytes]:
    """The configuration beside them."""
    return [
        json.dumps({"model_type": "kvzap", "input_dim": 6, "hidden_dim": 3, "output_dim": 2, "n_modules": 2}).encode()
    ]


# --- ledgers and samples ----------------------------------------------------------------------------------------------


@contextmanager
def _place() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        yield Path(folder)


def run_config(job: str) -> RunConfig:
    """The configuration beside a ledger."""
    return RunConfig(job=job, command=["kvsearch"], options={"model": "m"}, content={"job": job})  # type: ignore[arg-type]


@lru_cache
def search_ledgers() -> list[bytes]:
    """The ledger of a search, with a line of every kind."""
    tables = np.array([[8, 4], [6, 6]]), np.array([[6, 6], [7, 5]])
    job = Job(0, tables, (3, 5), "nll")
    points = [np.array([1.0, 0.1 + 0.2]), np.array([2**-1074, -1e308])]
    with _place() as folder:
        with SearchLedger(folder / "ledger.jsonl", run_config("evolve").identity) as ledger:
            ledger.append("stage", name="group 1", begins=True, settings={"layers": [0, 1], "sigma": 0.3})
            ledger.append("asked", stage="group 1", generation=0, points=points)
            ledger.keep(job, JobOutcome(0, "ok", np.array([[0.3, 2.0], [1 / 3, -5e-324]]), "", 1.5, 40))
            ledger.append("told", stage="group 1", generation=0, points=points[::-1], values=[0.5, 1 / 3])
            ledger.keep(Job(1, tables[:1], (3,), "nll"), JobOutcome(1, "error", None, "it broke", 0.5, 3))
            ledger.append("best", candidate=tables[1], value=1 / 3, where="group 1, generation 0")
            ledger.append("stage", name="group 1", begins=False)
        return [(folder / "ledger.jsonl").read_bytes()]


def reply(**changes: Any) -> Sample:
    """A reply to a question."""
    plain = {
        "task": "qa", "category": "c", "method": "lava@8", "protocol": "question-agnostic", "key": "0-1", "question": 2,
        "reply": 'he said "a, b"\nand left', "score": 0.25, "prompt_sha256": "ab" * 32, "truncated": True,
        "context_tokens": 100, "prompt_tokens": 120, "reply_tokens": 7, **Cost(40, 1024.5, 47, 0.125, 0.3)._asdict(),
    }  # fmt: skip
    return Sample(**{**plain, **changes})


@lru_cache
def reply_ledgers() -> list[bytes]:
    """The ledger of an evaluation."""
    with _place() as folder:
        with ReplyStore(folder / "ledger.jsonl", run_config("evaluate").identity) as ledger:
            ledger.add([("k1", reply()), ("k2", reply(key="0-2", reply="", score=1.0))])
            ledger.add([("k3", reply(task="again", method="full"))], reused=True)
            ledger.add([("k4", reply(key="0-3", question=0))])
        return [(folder / "ledger.jsonl").read_bytes()]


@lru_cache
def signal_samples() -> list[bytes]:
    """Samples of a calibration by signals that is not finished."""
    rng, count = np.random.default_rng(0), 2
    arrays: dict[str, Any] = {name: rng.uniform(size=(count, *shape)) for name, shape in SHAPES.items()}
    for name, value in {"prompt": [0, 1], "question": [0, 0], "sample_context": [0, 1]}.items():
        arrays[name] = np.array(value, np.int32)
    arrays |= {"sample_length": np.array([90, 80], np.int32), "sample_tokens": np.array([5, 6], np.int32)}
    return [save({**arrays, "attention_sum": rng.uniform(size=(*SUMMED, 7))}, IDENTITY)]


@lru_cache
def step_samples() -> list[bytes]:
    """The arrays of a step of a calibration that is not finished."""
    from kvsearch.calibration.steps import Steps

    with _place() as folder:
        Steps(folder, IDENTITY).stage()(lambda: {"0.0": np.arange(6).reshape(1, 6), "0.1": np.ones((2, 3), np.float32)})
        return [next(folder.glob("samples/*")).read_bytes()]


# --- data -------------------------------------------------------------------------------------------------------------


def _rows(*rows: dict[str, Any]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def tasks() -> list[bytes]:
    """Questions of one's own."""
    one = {"context": "the code of amber is seven .", "question": "code amber", "answers": ["seven", "7"]}
    more = {"max_new_tokens": 8, "prefix": "It is", "category": "codes", "id": "a-1"}
    choice = {
        "question": "which ?",
        "answers": ["red"],
        "options": ["red", "blue"],
        "context": "the red fox .",
        "metric": "exact",
    }
    return [
        _rows(one, {**one, **more}, {**one, "question": "code of\nwhat"}),
        _rows({**choice, "prompt": "\n{question}\n"}, {**choice, "id": 7, "prompt": "\n{question}\n"}),
        _rows({**one, "metric": "qa_f1"}),
    ]


def calibrations() -> list[bytes]:
    """Calibration data: with questions, with all that a question may have, and of a file beside it."""
    ask = {"question": "code amber", "answer": "seven ."}
    contexts = [
        {
            "text": "the code of amber is seven .",
            "questions": [ask, {**ask, "prefix": "it", "max_new_tokens": 4, "kind": "k"}],
        },
        {"text_file": "beside.txt", "kind": "story", "questions": [ask]},
    ]
    return [
        json.dumps({"name": "mine", "prompt": "\n{question}\n", "contexts": contexts}).encode(),
        json.dumps({"name": "mine", "contexts": contexts[:1]}).encode(),
    ]


def texts() -> list[bytes]:
    """Plain text."""
    return ["The keeper of Orrin Light eats rye bread. “So it is,” he said.\n\nNobody asked – 好。\n".encode() * 3]


def text_rows() -> list[bytes]:
    """Rows of text, for perplexity."""
    return [_rows({"text": "the jolly fox"}, {"text": "chases the guard .", "id": 3})]


def squad() -> list[bytes]:
    """A file in the format of SQuAD."""
    asked = [
        {"question": "who?", "answers": [{"text": "fox"}], "is_impossible": False},
        {"question": "x", "answers": [], "is_impossible": True},
    ]
    parts = [
        {"context": "the fox ran " * 250, "qas": asked},
        {"context": "the bear slept " * 250, "qas": [{"question": "what?", "answers": [{"text": "bear"}]}]},
    ]
    return [json.dumps({"version": "2.0", "data": [{"title": "t", "paragraphs": parts}]}).encode()]


def hotpot() -> list[bytes]:
    """A file in the format of HotpotQA."""
    context = [["A", ["one. "] * 400 + ["two."]], ["B", ["three. "] * 400]]
    return [json.dumps([{"_id": "1", "question": "what?", "answer": "two", "context": context, "type": "x"}]).encode()]


def templates() -> list[bytes]:
    """Prompts of datasets."""
    return [
        json.dumps(
            {"narrativeqa": "Read this.\n{context}\n\nQ: {input}\nA:", "qasper": "{context} {{x}} {input}"}
        ).encode()
    ]


def longbench() -> list[bytes]:
    """Rows of LongBench."""
    row = {
        "input": "who?",
        "context": "the fox ran",
        "answers": ["fox"],
        "length": 3,
        "dataset": "narrativeqa",
        "language": "en",
        "all_classes": None,
        "_id": "a",
    }
    return [_rows(row, {**row, "_id": "b", "context": "a bear", "answers": ["bear", "a bear"]})]


def gsm8k() -> list[bytes]:
    """Rows of GSM8K."""
    return [
        _rows(
            {"question": "2 and 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
            {"question": "10?", "answer": "It is 1,000\n#### 1,000"},
        )
    ]


def infinitebench() -> list[bytes]:
    """Rows of InfiniteBench."""
    return [
        _rows(
            {"id": 0, "context": "the key is 12345 .", "input": "what is the key?", "answer": ["12345"], "options": []}
        )
    ]


def tables() -> list[bytes]:
    """Rows as CSV."""
    return [b'question,answer\n"who, then?","a\n#### 4"\nwhat,"x\n#### 5"\n']


def parquet() -> list[bytes]:
    """Rows as Parquet."""
    import pandas

    data = io.BytesIO()
    pandas.DataFrame([{"question": "2?", "answer": "a\n#### 4"}, {"question": "3?", "answer": "b\n#### 5"}]).to_parquet(
        data
    )
    return [data.getvalue()]


def archives() -> list[bytes]:
    """Rows of LongBench in a zip archive."""
    import zipfile

    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/narrativeqa.jsonl", longbench()[0])
    return [data.getvalue()]


def recipes(job: str) -> list[bytes]:
    """The recipes that are shipped for a job."""
    return [path.read_bytes() for path in sorted(resource(f"recipes/{job}").glob("*.yaml"))]


@lru_cache
def caches() -> list[bytes]:
    """A compressed cache of a tiny model."""
    from tests.robustness.tiny_cache import written

    return [written()]
