"""Checkpoints and models as peft, bitsandbytes and torchao make them: python -m tests.public_cases.quantised NAME DIR

The packages are in a folder of their own (`scripts/bootstrap.py`), so each check runs in a process that has it on its
path; tests/public_cases/test_quantised.py starts them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import kvsearch
from kvsearch.core.errors import IncompatibleError
from kvsearch.models.fingerprint import compute_fingerprint, hash_weights
from kvsearch.models.loading import LoadOptions, load
from kvsearch.models.weights import count_stored_bytes, list_named_tensors
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


def reads(folder: Path) -> subprocess.CompletedProcess[str]:
    """Generate with a folder by the command."""
    command = [
        sys.executable,
        "-m",
        "kvsearch",
        "generate",
        str(folder),
        "--prompt",
        "recall mark",
        "--max-new-tokens",
        "3",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


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
    for changes in ({}, {"use_dora": True}, {"lora_bias": True}):
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


def adapters_have_fingerprints(folder: Path) -> None:
    """An adapter counts while it is active, under whatever label it was loaded; a saved one is the same when loaded."""
    peft = import_module("peft")
    base = weighted()
    made = hash_weights(base)
    wrapped = lora(deepcopy(base), modules_to_save=["lm_head"])
    adapted = hash_weights(wrapped)
    assert adapted != made
    with wrapped.disable_adapter():
        assert hash_weights(wrapped) == made
    assert hash_weights(lora(deepcopy(base), modules_to_save=["lm_head"], lora_alpha=33)) != adapted
    wrapped.save_pretrained(folder / "adapter")
    again = peft.PeftModel.from_pretrained(deepcopy(base), folder / "adapter", adapter_name="other").eval()
    assert hash_weights(again) == adapted
    plain = lora(deepcopy(base))
    merged = hash_weights(deepcopy(plain).merge_and_unload())
    plain.merge_adapter()
    assert hash_weights(plain) == merged != made


def adapter_folders_are_named(folder: Path) -> None:
    """An adapter without its model, as trainers leave it; one beside its model, which transformers puts on it."""
    wrapped = lora(AutoModelForCausalLM.from_pretrained(saved(folder / "base"), dtype=torch.float32))
    wrapped.save_pretrained(folder / "tuned")
    tokenizer().save_pretrained(folder / "tuned")
    refused = reads(folder / "tuned")
    assert refused.returncode == IncompatibleError.exit_code, refused.stderr
    assert "is an adapter (LoRA or another of PEFT's) of the model " + repr(str(folder / "base")) in refused.stderr
    assert refused.stderr.count("\n") == 1, refused.stderr
    base = hash_weights(load(str(folder / "base")).model)
    saved(folder / "tuned", weighted())
    both = load(str(folder / "tuned"))
    assert both.fingerprint.weights_sha256 == hash_weights(both.model) not in (base,)


def virtual_tokens_are_refused(folder: Path) -> None:
    peft = import_module("peft")
    model = weighted()
    made = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    with pytest.raises(IncompatibleError, match="LlamaForCausalLM is not supported: its adapter puts virtual tokens"):
        kept(made, CRITICAL, folder)


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


def four_bits_calibrate_or_say_why(folder: Path) -> None:
    model = weighted(intermediate_size=128)  # bitsandbytes on a CPU takes multiples of its blocks
    four = read_in_bits(saved(folder / "m", model), load_in_4bit=True)
    rows = folder / "q.jsonl"
    text = "recall mark . " * 60
    rows.write_text(f'{{"context": "{text}", "question": "recall", "answers": ["mark"], "max_new_tokens": 2}}\n' * 4)
    common = {"tokenizer": tokenizer(), "method": "lukv", "tasks": f"jsonl:{rows}", "samples": 2, "check": False}
    kvsearch.calibrate(four, output=str(folder / "layer"), normalization="layer", **common)
    try:
        kvsearch.calibrate(four, output=str(folder / "error"), **common)
    except IncompatibleError as error:
        assert "Linear4bit pass no gradients back on cpu" in str(error)


def torchao_checkpoints_load(folder: Path) -> None:
    """Tensor subclasses: read by the command, run under plans, counted and hashed by what they hold."""
    quantization = import_module("torchao.quantization")
    source = saved(folder / "m")
    kinds = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig")
    hashes = set()
    for kind in kinds:
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
        done = reads(folder / kind)
        assert done.returncode == 0, done.stderr
    assert len(hashes) == (3 if torch.cuda.is_available() else 2)  # the first two hold the same


CHECKS: dict[str, Callable[[Path], None]] = {
    check.__name__: check
    for check in (
        adapters_are_seen, adapters_have_fingerprints, adapter_folders_are_named, virtual_tokens_are_refused,
        eight_bits_are_dequantised, four_bits_are_dequantised, four_bits_calibrate_or_say_why, torchao_checkpoints_load,
    )
}  # fmt: skip

if __name__ == "__main__":
    CHECKS[sys.argv[1]](Path(sys.argv[2]))
