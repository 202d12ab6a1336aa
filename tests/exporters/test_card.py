"""The cards of what is exported: front matter that the hub reads, metrics with intervals, cards that go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from kvsearch.core.errors import UsageError
from kvsearch.exporters.base import ExportInputs, PlanScores
from kvsearch.exporters.folder import find_hub_id, render_folder_card, render_model_card
from kvsearch.plan import ModelFingerprint
from kvsearch.runs.estimates import Estimate
from tests.plan.builders import make_plan

NAN = float("nan")
SCORES = PlanScores(
    text="It scores well.",
    metrics={
        "score, percent [81.8, 95.4]": Estimate(89.9, 81.8, 95.4, contexts=60),
        "full cache minus plan": Estimate(10.0, NAN, NAN, contexts=4),
    },
    metric="exact",
    tasks=("qasper", "mine"),
    datasets=("zai-org/LongBench",),
    questions=160,
)
THEIRS = """\
---
license: apache-2.0
tags:
- chat
datasets: some/data
model-index:
- name: theirs
  results:
  - task:
      type: text-generation
    dataset:
      type: arc
      name: ARC
    metrics:
    - type: accuracy
      value: 71.5
---

# Their model

---

It is theirs.
"""


def parts(card: bytes) -> tuple[dict[str, Any], str]:
    """The front matter, as YAML and as the hub has it, and the text."""
    text = card.decode()
    _, front, body = text.split("---\n", 2)
    data = yaml.safe_load(front)
    assert ModelCard(text).data.to_dict() == data
    return data, body


def renamed(name: str, revision: str | None = None) -> ModelFingerprint:
    return make_plan().model.model_copy(update={"name": name, "revision": revision})


def test_metrics_have_their_intervals() -> None:
    data, body = parts(render_folder_card(make_plan(), SCORES))
    assert data["base_model"] == "toy"
    assert data["datasets"] == ["zai-org/LongBench"]
    [model] = data["model-index"]
    [result] = model["results"]
    assert model["name"] == "toy"
    assert result["dataset"] == {"type": "zai-org/LongBench", "name": "qasper, mine", "split": "report"}
    score, loss = result["metrics"]
    assert (score["type"], score["value"], score["name"]) == ("exact", 89.9, "score, percent [81.8, 95.4]")
    assert score["args"] == {"plan": "0.8", "questions": 160, "contexts": 60, "interval_95": [81.8, 95.4]}
    assert loss["args"] == {"plan": "0.8", "questions": 160, "contexts": 4}
    assert "## What it scores\n\nIt scores well.\n" in body
    assert "model-index" not in parts(render_folder_card(make_plan(), None))[0]


def test_the_card_of_a_model_goes_on() -> None:
    first = render_model_card(make_plan(), "kvsearch/plan.json", ExportInputs(card=THEIRS, scores=SCORES))
    data, body = parts(first)
    assert list(data)[:3] == ["license", "tags", "datasets"]
    assert data["tags"] == ["chat", "kvsearch", "kv-cache", "kv-cache-compression"]
    assert data["datasets"] == ["some/data", "zai-org/LongBench"]
    assert "base_model" not in data  # theirs is what they say it is
    theirs, ours = data["model-index"][0]["results"]
    assert theirs["metrics"] == [{"type": "accuracy", "value": 71.5}]
    assert len(ours["metrics"]) == 2
    assert body.startswith(
        "\n# Their model\n\n---\n\nIt is theirs.\n\n<!-- kvsearch plan 0.8 -->\n## KV-cache plan 0.8\n"
    )
    again = render_model_card(make_plan(), "kvsearch/plan.json", ExportInputs(card=first.decode(), scores=SCORES))
    assert again == first
    half = make_plan().model_copy(update={"length": 16})
    goes_on = ExportInputs(card=first.decode(), scores=SCORES)
    both, body = parts(render_model_card(half, "kvsearch/plan-0.5.json", goes_on))
    heads = [line for line in body.splitlines() if line.startswith("## ")]
    assert heads == ["## KV-cache plan 0.8", "## KV-cache plan 0.5"]
    sizes = [metric["args"]["plan"] for metric in both["model-index"][0]["results"][1]["metrics"]]
    assert sizes == ["0.8", "0.8", "0.5", "0.5"]
    _, body = parts(render_model_card(make_plan(), "kvsearch/plan.json", ExportInputs(card="# No front matter")))
    assert body.startswith("\n# No front matter\n")


@pytest.mark.parametrize("front", ["[1, 2", "- 1", "model-index: 3", "1: 2"])
def test_front_matter_that_cannot_be_read_is_one_line(front: str) -> None:
    inputs = ExportInputs(card=f"---\n{front}\n---\n\ntext", scores=SCORES)
    with pytest.raises(UsageError, match=r"the front matter of the README\.md beside the model cannot") as caught:
        render_model_card(make_plan(), "kvsearch/plan.json", inputs)
    assert "\n" not in str(caught.value)


def test_what_is_an_id_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_hub_id(renamed("smollm2")) == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert find_hub_id(renamed("gpt2")) == "gpt2"
    for name in ("bundled", "/home/me/model", "./model", "some/model.gguf", "a model"):
        assert find_hub_id(renamed(name)) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert find_hub_id(renamed("some/model")) is None
    assert find_hub_id(renamed("some/model", revision="a" * 40)) == "some/model"
