"""Checkpoints and models as peft, bitsandbytes and torchao make them, by python -m tests.public_cases.quantised

The packages are in a folder of their own (`scripts/bootstrap.py`), so the checks run in processes that have it on their
path; tests/public_cases/test_quantised.py starts them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import kvsearch
from kvsearch.core.errors import IncompatibleError
from kvsearch.models.fingerprint import compute_fingerprint, hash_weights
from kvsearch.models.loading import LoadOptions, load
from kvsearch.models.weights import count_stored_bytes, list_named_tensors
from tests.cli.conftest import invoke
from tests.models.layouts import projections
from tests.models.test_weights import kept, weighted
from tests.tiny import tokenizer

CRITICAL = "criticalkv:window=8"
OTHERS = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]  # than output projections


def saved(folder: Path, model: Any = None) -> Path:
    """Write a tiny Llama with the bundled tokenizer."""
    (weighted() if model is None else model).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def reads(folder: Path) -> tuple[int, str, str]:
    """Generate with a folder by the command: exit code, output and errors."""
    return invoke("generate", folder, "--prompt", "recall mark", "--max-new-tokens", 3)


def read_in_bits(folder: Path, **config: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map="cpu", quantization_config=BitsAndBytesConfig(**config)
    )


def with_weights(model: Any, weights: list[torch.Tensor]) -> Any:
    """A copy of a float model with other output projections."""
    other = deepcopy(model)
    for attention, weight in zip(projections(other), weights, strict=True):
        attention.o_proj.weight = nn.Parameter(weight.clone())
    return other


def lora(model: Any, **changes: Any) -> Any:
    """A model in PEFT's wrapper, with an adapter that matters."""
    peft = import_module("peft")
    torch.manual_seed(1)
    settings = {"r": 8, "lora_alpha": 32, "target_modules": ["o_proj"], "task_type": "CAUSAL_LM", **changes}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **settings)).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.mul_(3)
    return wrapped


def adapters_are_seen(folder: Path) -> None:
    """As in the merged model; switched off they are not there. Names of PEFT are shown nowhere."""
    for changes in ({"use_dora": True}, {"lora_bias": True}):
        base = weighted()
        for attention in projections(base):
            attention.o_proj.bias = nn.Parameter(torch.randn(64))
        wrapped = lora(deepcopy(base), **changes)
        merged = deepcopy(wrapped).merge_and_unload()
        assert kept(wrapped, CRITICAL, folder) == kept(merged, CRITICAL, folder) != kept(base, CRITICAL, folder), (
            changes
        )
        with wrapped.disable_adapter():
            assert kept(wrapped, CRITICAL, folder) == kept(base, CRITICAL, folder)
    assert compute_fingerprint(wrapped).name == "LlamaForCausalLM"
    assert not any("base_" in name for name, _ in list_named_tensors(wrapped))


def adapter_folders_are_named(folder: Path) -> None:
    """An adapter without its model, as trainers leave it; one beside its model, which transformers puts on it."""
    wrapped = lora(AutoModelForCausalLM.from_pretrained(saved(folder / "base"), dtype=torch.float32))
    wrapped.save_pretrained(folder / "tuned")
    tokenizer().save_pretrained(folder / "tuned")
    code, _, talk = reads(folder / "tuned")
    assert code == IncompatibleError.exit_code, talk
    assert "is an adapter (LoRA or another of PEFT's) of the model " + repr(str(folder / "base")) in talk
    assert talk.count("\n") == 1, talk
    base = hash_weights(load(str(folder / "base")).model)
    saved(folder / "tuned", weighted())
    both = load(str(folder / "tuned"))
    assert both.fingerprint.weights_sha256 == hash_weights(both.model) not in (base,)


def eight_bits_are_dequantised(folder: Path) -> None:
    """bitsandbytes: codes and scales of rows, before and after the first pass, which moves the scales; and QLoRA."""
    model = weighted()
    eight = read_in_bits(saved(folder / "m", model), load_in_8bit=True, llm_int8_skip_modules=OTHERS)
    held = [attention.o_proj.weight for attention in projections(eight)]
    same = with_weights(model, [one.data.float() * one.SCB[:, None] / 127 for one in held])
    before = hash_weights(eight)
    for policy in (CRITICAL, "defensivekv:window=8"):
        assert kept(eight, policy, folder) == kept(same, policy, folder)
    assert hash_weights(eight) == before != hash_weights(same)
    projections(eight)[0].o_proj.state.SCB[0] *= 2
    assert hash_weights(eight) != before
    projections(eight)[0].o_proj.state.SCB[0] /= 2
    wrapped, other = lora(eight), lora(same)
    assert kept(wrapped, CRITICAL, folder) == kept(other, CRITICAL, folder)


def four_bits_are_dequantised(folder: Path) -> None:
    """bitsandbytes: packed codes, before and after a CPU arranges them anew in the first pass."""
    functions = import_module("bitsandbytes").functional
    model = weighted()
    for nested in (False, True):
        config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": nested}
        four = read_in_bits(saved(folder / "m", model), **config, llm_int8_skip_modules=OTHERS)
        held = [attention.o_proj.weight for attention in projections(four)]
        same = with_weights(model, [functions.dequantize_4bit(one.data, one.quant_state).float() for one in held])
        before = hash_weights(four)
        for _ in range(2):
            assert kept(four, CRITICAL, folder) == kept(same, CRITICAL, folder)
            assert hash_weights(four) == before
        assert str(four.dtype) == "torch.float32"
        assert count_stored_bytes(four.modules()) < count_stored_bytes(model.modules())


def torchao_checkpoints_load(folder: Path) -> None:
    """Tensor subclasses: read by the command, run under plans, counted and hashed by what they hold."""
    quantization = import_module("torchao.quantization")
    source = saved(folder / "m")
    hashes = set()
    for kind in ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig"):
        config = TorchAoConfig(getattr(quantization, kind)())
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=config)
        weights = [attention.o_proj.weight.dequantize() for attention in projections(model)]
        same = with_weights(AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16), weights)
        module = projections(model)[0]
        made = kvsearch.models.architecture.read_output_weight(module, 8, torch.bfloat16)
        expected = kvsearch.models.architecture.read_output_weight(projections(same)[0], 8)
        torch.testing.assert_close(made, expected, atol=0, rtol=2**-7)
        assert sum(tensor.nbytes for name, tensor in list_named_tensors(model) if "o_proj" in name) < 4 * 64 * 128 * 2
        assert str(model.dtype) == "torch.bfloat16"
        hashes.add(hash_weights(model))
        saved(folder / kind, model)
        again = load(str(folder / kind), LoadOptions(device="cpu"))
        assert again.fingerprint.weights_sha256 == hash_weights(model)
        code, _, talk = reads(folder / kind)
        assert code == 0, talk
    assert len(hashes) == 2


CHECKS: dict[str, tuple[Callable[[Path], None], ...]] = {
    "peft": (adapters_are_seen, adapter_folders_are_named),
    "bitsandbytes": (eight_bits_are_dequantised, four_bits_are_dequantised),
    "torchao": (torchao_checkpoints_load,),
}

if __name__ == "__main__":
    for check in CHECKS[sys.argv[1]]:
        place = Path(sys.argv[2]) / check.__name__
        place.mkdir()
        check(place)
