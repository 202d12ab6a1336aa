"""Tiny random models of families, and prompts for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class TinyModel:
    """What a tiny random model of a family is made of.

    Args:
        model: the class of its language models, by its name in transformers.
        changes: settings besides those of `SHAPE`.
        config: the class of their configuration; default: it is called as the model is.
    """

    model: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    config: str | None = None


# by the model_type of their configurations, and those that are refused
TINY = {
    family: TinyModel(**made)
    for family, made in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}

REFUSED = ("bloom", "falcon", "mpt")  # the runtime cannot serve them

# all that is done to a model is tested on these; the others have one test each (tests/runtime/test_families.py)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")
USUAL = ("llama", "gemma2")  # of which these run before every commit
EACH_FAMILY = [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.nightly]) for name in FAMILIES]


def take_families(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test by families; of several, only the usual ones run before every commit."""
    usual = [name for name in names if name in USUAL] or names[:1]
    marks = [[] if name in usual else [pytest.mark.nightly] for name in names]
    return pytest.mark.parametrize(
        "family", [pytest.param(name, marks=of) for name, of in zip(names, marks, strict=True)]
    )


# what their attention or their other layers need is tested on these
SPECIAL = ("gpt_oss", "jamba", "lfm2", "llama4", "minimax", "qwen3_5", "qwen3_next")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
if (asked := os.environ.get("KVSEARCH_TEST_DEVICE")) is not None:  # tests of the runtime on another device only
    DEVICES = [asked]
    if asked.startswith("fakegpu"):
        from tests.torture.device.accelerator import backend

        backend()


def prompts(batch: int, length: int, pads: int = 0, device: str = "cpu", seed: int = 0) -> tuple[Any, Any]:
    """Random ids [batch, length] and their attention mask; the first row starts with `pads` padding tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :pads], mask[0, :pads] = 0, 0
    return ids.to(device), mask.to(device)


def build(name: str, device: str = "cpu", **changes: Any) -> Any:
    """Make a tiny random model of a family, with weights large enough for attention to be far from uniform."""
    import transformers

    tiny = TINY[name]
    config_class = getattr(transformers, tiny.config or tiny.model.removesuffix("ForCausalLM") + "Config")
    torch.manual_seed(1)
    model = getattr(transformers, tiny.model)(config_class(**{**SHAPE, **tiny.changes, **changes}))
    model.set_attn_implementation("sdpa" if model._supports_sdpa and name != "gemma2" else "eager")
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=0.25 if parameter.dim() > 1 else 1.0)
    return model.eval().to(device)
