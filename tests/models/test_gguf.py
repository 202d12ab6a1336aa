"""GGUF files are models: a tiny one that is written here, and what is refused; tests/real has a real one."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import kvsearch
from kvsearch.core.errors import EnvironmentFault, IncompatibleError, UsageError
from kvsearch.models import gguf
from kvsearch.models.loading import LoadOptions, load
from kvsearch.models.real import HOME_VARIABLE
from kvsearch.plan.saved import MODEL_KEY
from tests.cli.conftest import done, invoke
from tests.families import build
from tests.public_cases.tokenizers_in_use import TEXT, byte_level

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %} recall"
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
    writer.add_chat_template(TEMPLATE)
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


def test_the_header_of_a_file_is_read_once(tiny: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A large vocabulary in it takes most of the time of loading: it was read for every part of a model."""
    from gguf import GGUFReader

    made: list[str] = []
    make = GGUFReader.__init__
    monkeypatch.setattr(GGUFReader, "__init__", lambda reader, path: [made.append(path), make(reader, path)][1])
    load(str(tiny[0]))
    assert len(made) == 1
    load(str(tiny[0]))
    assert len(made) == 2  # a file that was changed is another one


@pytest.mark.nightly
@pytest.mark.parametrize("computes", [True, False])
def test_what_the_processor_computes_in_is_the_default(
    tiny: tuple[Path, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computes: bool
) -> None:
    path, model, tokenizer = tiny
    monkeypatch.setattr("kvsearch.models.loading.has_bfloat16", lambda: computes)
    monkeypatch.setattr("kvsearch.models.loading.find_best_device", lambda: "cpu")
    stored = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16" if computes else "float16"}
    wanted = {path: "bfloat16" if computes else "float32"}
    for dtype, default in stored.items():
        folder = tmp_path / dtype
        copy.deepcopy(model).to(getattr(torch, dtype)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        wanted[folder] = default
    for source, default in wanted.items():
        for weights in (True, False):
            loaded = load(str(source), weights=weights)
            assert str(loaded.model.dtype) == f"torch.{default}"
            assert bool(loaded.remark) == (source.name != "float32")
    _, talk = done("generate", path, "--context", TEXT[:200], "--prompt", "who?", "--max-new-tokens", 1)
    assert talk.startswith(f"{path}: in {wanted[path]}, as ")
    _, talk = done("generate", path, "--context", TEXT[:200], "--prompt", "who?", "--dtype", "float32")
    assert ": in " not in talk


def plan_of(source: object, path: Path) -> Path:
    """A plan file of twelve entries a head."""
    done("plan", "uniform", source, "--policy", "snapkv:window=4", "--budget", 12, "-o", path)
    return path


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_a_plan_is_exported_with_the_model_as_an_ordinary_folder(
    tiny: tuple[Path, Any, Any], tmp_path: Path, dtype: str
) -> None:
    source, plan, folder = tiny[0], plan_of(tiny[0], tmp_path / "plan.json"), tmp_path / "new" / "folder"
    words = ("export", plan, "--to", "model", "-o", folder, "--dtype", dtype)
    done(*words, "--dry-run")
    assert not folder.parent.exists()
    _, talk = done(*words)
    assert f"wrote {folder} for model, and {source} itself in {dtype}: nothing is lost" in talk
    assert [file.name for file in folder.glob(".*")] == []
    loaded = load(str(source), LoadOptions(dtype=dtype))
    with torch.no_grad():
        ids = tiny[2](TEXT[:200], return_tensors="pt").input_ids
        stock = AutoModelForCausalLM.from_pretrained(folder)
        again = load(str(folder))
        assert stock.dtype == again.model.dtype == getattr(torch, dtype)
        assert torch.equal(stock(ids).logits, loaded.model(ids).logits)
        assert torch.equal(again.model(ids).logits, loaded.model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXT)["input_ids"] == tiny[2](TEXT)["input_ids"]
    assert tokenizer.chat_template == TEMPLATE
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tiny[2].eos_token_id
    assert kvsearch.load_plan("auto", stock) == kvsearch.load_plan(plan)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    loaded.model.save_pretrained(tmp_path / "stock")
    assert config.keys() - {MODEL_KEY} == json.loads((tmp_path / "stock" / "config.json").read_text()).keys()
    with kvsearch.attach(stock) as planned:
        planned.generate(ids, max_new_tokens=2, do_sample=False)
        assert planned.cache.entries().max() <= 12 + 2
    done("verify", folder)
    card = ModelCard.load(folder / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers", "pipeline_tag": "text-generation",
        "tags": ["kvsearch", "kv-cache", "kv-cache-compression"],
    }  # fmt: skip
    assert f"The weights are those of tiny.gguf, dequantised to {dtype}." in card.text
    assert "Keeps 12 entries per kv head on average, 96 in 8 heads" in card.text


@pytest.mark.nightly
def test_where_no_folder_of_a_model_can_be_made(tiny: tuple[Path, Any, Any], tmp_path: Path) -> None:
    plan, folder = plan_of(tiny[0], tmp_path / "plan.json"), tmp_path / "folder"
    export = ("export", plan, "--to", "model", "--dtype", "float32", "-o")
    folder.mkdir()
    (folder / "tokenizer.json").write_text("mine")
    code, _, talk = invoke(*export, folder)
    assert (code, talk.count("\n")) == (2, 1)
    assert "tokenizer.json exists: choose another folder, or --force to replace it" in talk
    code, _, talk = invoke(*export, tiny[0])
    assert (code, talk.count("\n")) == (2, 1)
    assert "is a file: give a directory to write to" in talk
    other = json.loads(plan.read_text())
    other["model"]["name"] = "a/folder"
    plan.write_text(json.dumps(other))
    code, _, talk = invoke(*export, tmp_path / "new")
    assert (code, talk.count("\n")) == (2, 1)
    assert "give that of the model, or a new one and --model, and the model is saved there, too" in talk
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "plan.json"]
    assert [file.name for file in folder.iterdir()] == ["tokenizer.json"]
    done(*export, tmp_path / "new", "--model", tiny[0])
    other["model"]["weights_sha256"] = "0" * 64
    plan.write_text(json.dumps(other))
    code, _, talk = invoke(*export, tmp_path / "newer", "--model", tiny[0])
    assert (code, talk.count("\n")) == (4, 1)
    assert not (tmp_path / "newer").exists()


def test_a_full_disk_leaves_no_part_of_a_model(
    tiny: tuple[Path, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tiny[0], tmp_path / "plan.json")

    def fail(self: Any, folder: str) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"part")
        raise SafetensorError('IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })')

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", fail)
    code, _, talk = invoke("export", plan, "--to", "model", "-o", tmp_path / "folder")
    problem = talk.splitlines()[-1]  # before it may stand in which numbers the weights are
    assert code == 3
    assert "No space left on device" in problem
    assert not (tmp_path / "folder").exists()


@pytest.mark.slow
@pytest.mark.nightly
def test_every_command_takes_a_file(tiny: tuple[Path, Any, Any], tmp_path: Path) -> None:
    source, data = tiny[0], tmp_path / "texts.jsonl"
    asked = [{"context": f"{n} {TEXT[:120]}", "question": "who?", "answers": ["a"]} for n in range(8)]
    data.write_text("\n".join(map(json.dumps, asked)))
    tasks = ("--tasks", f"jsonl:{data}")
    few = (*tasks, "--samples", 2)
    plan = plan_of(source, tmp_path / "plan.json")
    done("calibrate", source, "--policy", "streaming", "--normalization", "layer", *tasks, "--questions", 2,
         "--answer-tokens", 2, "--no-check", "-o", tmp_path / "cal")  # fmt: skip
    done("export", tmp_path / "cal", "--ratio", 0.5, "--to", "folder", "-o", tmp_path / "deploy")
    done("export", tmp_path / "cal", "--ratio", 0.5, "--to", "model", "-o", tmp_path / "model")
    done("evaluate", source, "--plan", plan, *few, "-o", tmp_path / "scores")
    done("headroom", source, "--ratio", 0.5, *few, "-o", tmp_path / "headroom")
    done("compress", source, "--plan", plan, "--context", TEXT[:200], "-o", tmp_path / "context.kv")
    done("generate", source, "--cache", tmp_path / "context.kv", "--prompt", "who?", "--max-new-tokens", 1)
    done("verify", tmp_path)


@pytest.mark.parametrize("dense", [True, False])
def test_a_model_that_transformers_has_loaded_is_attached(
    tiny: tuple[Path, Any, Any], tmp_path: Path, dense: bool
) -> None:
    plan = kvsearch.load_plan(plan_of(tiny[0], tmp_path / "plan.json"))
    how = gguf.make_loading_arguments(tiny[0]) if dense else {}
    model = AutoModelForCausalLM.from_pretrained(tiny[0].parent, gguf_file=tiny[0].name, **how).eval()
    ids = tiny[2](TEXT[:200], return_tensors="pt").input_ids
    with kvsearch.attach(model, plan) as planned:
        planned.generate(ids, max_new_tokens=2, do_sample=False)
        assert planned.cache.entries().max() <= 12 + 2


@pytest.mark.parametrize("command", ["run", "calibrate", "headroom", "evaluate", "plan uniform", "generate"])
def test_a_file_that_was_cut_short_is_one_line_and_leaves_nothing(
    command: str, tiny: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    whole = tiny[0].read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    output = ("-o", tmp_path / "out")
    more: dict[str, tuple[object, ...]] = {
        "run": ("--budget", 12, "--tasks", "ruler:niah_single_2", *output),
        "calibrate": ("--policy", "streaming", *output),
        "headroom": ("--ratio", 0.5, *output),
        "evaluate": ("--methods", "streaming", "--budgets", 12, *output),
        "plan uniform": ("--policy", "streaming", "--budget", 12, *output),
        "generate": ("--prompt", "who?"),
    }
    code, out, talk = invoke(*command.split(), tmp_path / "cut.gguf", *more[command])
    assert (code, out, talk.count("\n")) == (4, "", 1), talk
    assert "cut.gguf' cannot be loaded: its file (is it whole?): " in talk
    assert [file.name for file in tmp_path.iterdir()] == ["cut.gguf"]
    code, _, talk = invoke(*command.split(), tmp_path / "away.gguf", *more[command])
    assert (code, talk.count("\n")) == (2, 1)
    assert f"there is no file {tmp_path / 'away.gguf'}: check the path" in talk


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
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    with pytest.raises(EnvironmentFault, match=r"not fetched yet: `python scripts/real_models.py smollm2` brings it"):
        load("smollm2")
    with pytest.raises(UsageError, match="did you mean 'smollm2'"):
        load("smolm2")
