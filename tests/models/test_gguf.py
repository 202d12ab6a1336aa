"""GGUF files are models: a tiny one that is written here, and what is refused; tests/real has a real one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import kvsearch
from kvsearch.core.errors import EnvironmentFault, IncompatibleError, UsageError
from kvsearch.models import gguf
from kvsearch.models.loading import LoadOptions, load
from kvsearch.models.real import HOME
from tests.families import build
from tests.public_cases.tokenizers_in_use import TEXT, byte_level

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(path: Path, model: Any, tokenizer: Any) -> None:
    """Write a Llama in the names and the order of rows that llama.cpp has."""
    from gguf import GGUFWriter

    config = model.config
    rules = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(rules["vocab"], key=rules["vocab"].__getitem__)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") and token.endswith(">") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in rules["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        parts = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        if parts[0] != "layers":
            own = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts[0]]
            writer.add_tensor(f"{own}.weight", weight)
            continue
        if parts[2] in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in parts[2] else config.num_key_value_heads
            halves = weight.reshape(heads, 2, config.head_dim // 2, -1)
            weight = halves.swapaxes(1, 2).reshape(weight.shape).copy()
        writer.add_tensor(f"blk.{parts[1]}.{NAMES[parts[2]]}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A file, and the model and the tokenizer that are in it."""
    pytest.importorskip("gguf")
    tokenizer = byte_level()
    model = build("llama", vocab_size=len(tokenizer), hidden_size=64, head_dim=16, tie_word_embeddings=False)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, model, tokenizer)
    return path, model, tokenizer


def test_a_file_is_the_model_that_was_written(tiny: tuple[Path, Any, Any], tmp_path: Path) -> None:
    path, model, tokenizer = tiny
    loaded = load(str(path), LoadOptions(dtype="float32"))
    ids = tokenizer(TEXT[:200], return_tensors="pt").input_ids
    assert loaded.tokenizer(TEXT[:200], add_special_tokens=False)["input_ids"] == ids[0].tolist()
    torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, atol=2e-5, rtol=1e-4)
    loaded.model.save_pretrained(tmp_path / "folder")  # as any other
    loaded.tokenizer.bare.save_pretrained(tmp_path / "folder")
    again = load(str(tmp_path / "folder"), LoadOptions(dtype="float32"))
    assert again.fingerprint.weights_sha256 == loaded.fingerprint.weights_sha256
    plan = kvsearch.plans.uniform(str(path), policy="snapkv:window=4", budget=12, output=tmp_path / "plan.json")
    assert plan.model.weights_sha256 == loaded.fingerprint.weights_sha256
    [reply] = kvsearch.generate(str(path), plan=tmp_path / "plan.json", context=TEXT[:200], prompt="who?")
    assert reply.entries < reply.full_entries


def test_what_is_refused(tiny: tuple[Path, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny[0].read_bytes()
    for size in (100, len(whole) // 3, len(whole) - 4000):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(IncompatibleError, match=r"cut\.gguf' cannot be loaded: its file \(is it whole\?\): "):
            load(str(tmp_path / "cut.gguf"))
    (tmp_path / "other.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(IncompatibleError, match="no GGUF file, though its name says so: fetch it again"):
        load(str(tmp_path / "other.gguf"))
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(IncompatibleError, match=r"has no config\.json, so it is not the directory of"):
        load(str(tmp_path / "folder.gguf"))
    part = Path(shutil.copy(tiny[0], tmp_path / "large-00002-of-00003.gguf"))
    with pytest.raises(IncompatibleError, match=r"is part 2 of 3, .* join them with `llama-gguf-split --merge`"):
        load(str(part))
    monkeypatch.setattr(gguf, "find_spec", lambda _: None)
    with pytest.raises(EnvironmentFault, match="the package gguf, which is not installed: pip install gguf"):
        load(str(tiny[0]))


def test_a_real_model_that_was_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME, str(tmp_path))
    with pytest.raises(EnvironmentFault, match=r"not fetched yet: `python scripts/real_models.py smollm2` brings it"):
        load("smollm2")
    with pytest.raises(UsageError, match="did you mean 'smollm2'"):
        load("smolm2")
