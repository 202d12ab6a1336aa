"""Folders of models as people have them: what a checkpoint brings along is refused in one line, or works."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase, dynamic_module_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvsearch
from kvsearch.core.errors import EnvironmentFault, IncompatibleError
from kvsearch.models.foreign import CheckpointError, blame_checkpoint, find_culprit
from kvsearch.models.loading import load
from kvsearch.plan.saved import save_plan
from tests import tiny
from tests.cli.conftest import invoke

ENVIRONMENT, INCOMPATIBLE = EnvironmentFault.exit_code, IncompatibleError.exit_code
MARK = "<|document|>"  # a token that was added to the tokenizer after the model was made
ASKED = ("--prompt", "the calm fox", "--max-new-tokens", 2)
TRUST = ("--trust-remote-code",)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "saved"
    model = tiny.loaded()
    model.model.save_pretrained(path)
    model.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "folder"))


@pytest.fixture(scope="module", autouse=True)
def own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Code that checkpoints bring along is copied, and imported from there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


def complaint(folder: Path, *more: object, context: str = "the calm fox . " * 20, code: int = INCOMPATIBLE) -> str:
    """The one line in which `generate` refuses a model."""
    found, _, talk = invoke("generate", folder, "--context", context, *ASKED, *more)
    lines = [line for line in talk.splitlines() if line.startswith("kvsearch: error: ")]
    assert found == code, talk
    assert len(lines) == 1
    assert "a bug in kvsearch" not in talk
    return lines[0]


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --- token ids that the model has no embedding for --------------------------------------------------------------------


def add_token(folder: Path) -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([MARK])
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_a_token_that_the_model_was_not_resized_for(folder: Path) -> None:
    add_token(folder)
    assert invoke("generate", folder, "--context", "the calm fox . " * 20, *ASKED)[0] == 0
    said = complaint(folder, context=f"{MARK} the calm fox . " * 20)
    last = json.loads((folder / "config.json").read_text())["vocab_size"] - 1
    assert f"'{MARK}' (id {last + 1})" in said
    assert f"its last id is {last}: " in said
    assert "the text '<|document|> the calm fox" in said
    assert f"Question: {MARK}" in complaint(folder, "--prompt", MARK)


def test_rows_without_a_token_do_no_harm(folder: Path) -> None:
    tokenizer = add_token(folder)
    model = load(str(folder)).model
    model.resize_token_embeddings(len(tokenizer) + 7)
    reply, *_ = kvsearch.generate(
        model, tokenizer=tokenizer, context=f"{MARK} the calm fox . " * 20, prompt=["the"], max_new_tokens=2
    )
    assert reply.context_tokens > 20


@pytest.mark.nightly
@pytest.mark.parametrize(
    "verb",
    [
        "evaluate --methods uniform:snapkv --set window=4 --budgets 12 --samples 3 --tasks jsonl:{rows}",
        "calibrate --method query_statistics --tasks jsonl:{rows} --samples 3 -o {out}",
        "evolve --budget 12 --set window=4 --group-size 2 --generations 2 --finalists 3 --samples 3 "
        "--tasks jsonl:{rows} -o {out}",
        "headroom --tasks jsonl:{rows} --samples 3",
        "compress --plan {plan} --context @{text} -o {out}",
    ],
)
def test_every_command_names_the_token_and_where_it_is(verb: str, folder: Path, tmp_path: Path) -> None:
    add_token(folder)
    rows = [
        {"context": f"the calm fox {number} . " * 20 + MARK, "question": "the",
         "answers": ["fox"], "max_new_tokens": 2}
        for number in range(3)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "text").write_text(f"the calm fox {MARK} . " * 20)
    loaded = load(str(folder))
    save_plan(tiny.plan_for(loaded, [[12, 12]] * 4), tmp_path / "plan.json")
    places = {name: tmp_path / file for name, file in
              {"rows": "rows.jsonl", "text": "text", "plan": "plan.json", "out": "out"}.items()}  # fmt: skip
    name, *words = verb.format(**places).split()
    code, _, talk = invoke(name, folder, *words)
    assert code == INCOMPATIBLE, talk
    assert f"'{MARK}' (id " in talk
    if "rows" in verb:
        assert re.search(r"task rows, example \S+: the text", talk)


# --- chat templates ---------------------------------------------------------------------------------------------------


CONTENTS = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEMPLATES: dict[str, tuple[Any, str]] = {
    "wants a system": (
        "{% if messages[0].role != 'system' %}{{ raise_exception('begin with the system') }}{% endif %}" + CONTENTS,
        "TemplateError: begin with the system",
    ),
    "cannot be parsed": ("{% for m in messages %}{{ m.content }", "TemplateSyntaxError: unexpected"),
    "has no default": ({"tool_use": CONTENTS, "rag": CONTENTS}, "no default specified"),
    "is undefined": ("{{ tools.first.name }}", "UndefinedError: 'None' has no attribute|UndefinedError"),
    "adds numbers": ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate"),
    "is unsafe": ("{{ messages.__class__.__mro__ }}", "SecurityError"),
    "divides by zero": ("{{ 1 // 0 }}", "ZeroDivisionError"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_that_fail(name: str, folder: Path) -> None:
    template, words = TEMPLATES[name]
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit(folder / "tokenizer_config.json", chat_template=template)
    said = complaint(folder)
    assert re.search(rf"the chat template of model '\S+' fails \(.*(?:{words})", said)
    assert "or remove it there" in said


# --- files ------------------------------------------------------------------------------------------------------------


def wrong_shape(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"][:5].clone()}, path, {"format": "pt"})


def weights_in(file: str, content: str) -> Callable[[Path], Any]:
    """Put a file with this content into the place of the weights."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / file).write_text(content)

    return change


def written(file: str, content: str | bytes) -> Callable[[Path], Any]:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / file).write_bytes(data)


def edited(file: str, **changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / file, **changes)


GENERATION, TOKENIZER, CONFIG = "generation_config.json", "tokenizer_config.json", "config.json"
INDEX = "model.safetensors.index.json"
FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "generation config of no JSON": (written(GENERATION, "{oops"), "its generation_config.json: Expecting"),
    "generation config of no text": (written(GENERATION, b'{"a": "\xe9"}'), "its generation_config.json: 'utf-8'"),
    "generation config of a list": (written(GENERATION, "[1]"), "its generation_config.json: it must be an object"),
    "generation config of words": (edited(GENERATION, max_new_tokens="many"), "cannot be loaded: "),
    "an end that is a word": (edited(GENERATION, eos_token_id="</s>"), "must be a token id, .* not '</s>'"),
    "an end that is a fraction": (edited(GENERATION, eos_token_id=[1, 2.5]), "must be a token id, .* not 2.5"),
    "tokenizer config of no JSON": (written(TOKENIZER, "{oops"), "its tokenizer: Expecting"),
    "tokenizer config of a list": (written(TOKENIZER, "[]"), "its tokenizer: "),
    "an end of another type": (edited(TOKENIZER, eos_token=5), "its tokenizer: Special token eos_token"),
    "a length in words": (edited(TOKENIZER, model_max_length="many"), "the tokenizer of model .* fails"),
    "a newer tokenizer": (edited("tokenizer.json", model={"type": "Tomorrow"}), "its tokenizer: "),
    "sizes in words": (edited(CONFIG, hidden_size="big"), "its config.json: .*hidden_size"),
    "an unknown activation": (edited(CONFIG, hidden_act="nobody"), "KeyError: 'nobody'"),
    "a shape of another model": (wrong_shape, r"model.norm.weight is \[5\] in its files, and \[64\] by its config"),
    "a pointer to a large file": (written("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"),
                                  "its weights or code: .*header"),
    "weights of no pickle": (weights_in("pytorch_model.bin", "-"), "its weights or code: Weights only load failed"),
    "an index of no JSON": (weights_in(INDEX, "{oops"), "its weights or code: Expecting"),
    "an index of shards that are away": (
        weights_in(INDEX, '{"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
        "its weights or code: .*model-00001-of-00002",
    ),
}  # fmt: skip
EVERY_TIME = ("generation config of no JSON", "an end that is a word", "a shape of another model")


@pytest.mark.parametrize(
    "name", [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.nightly) for name in FILES]
)
def test_files_that_are_damaged(name: str, folder: Path) -> None:
    change, words = FILES[name]
    change(folder)
    assert re.search(words, complaint(folder))


@pytest.mark.nightly
def test_a_tokenizer_without_special_tokens(folder: Path) -> None:
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        edit(folder / TOKENIZER, **{name: None})
    assert invoke("generate", folder, "--context", "the calm fox . " * 20, *ASKED)[0] == 0


# --- code that a checkpoint brings along ------------------------------------------------------------------------------


TOKENIZER_CODE = """
from transformers import PreTrainedTokenizer

class Letters(PreTrainedTokenizer):
    vocab_files_names = {}
    vocab_size = 100

    def get_vocab(self): return {chr(i): i for i in range(100)}
    def _tokenize(self, text, **kw): return list(text)
    def _convert_token_to_id(self, token): return ord(token) % 100 if len(token) == 1 else 0
    def _convert_id_to_token(self, index): return chr(index)
    def convert_tokens_to_string(self, tokens): return "".join(tokens)
    def save_vocabulary(self, *a, **k): return ()
"""
MODEL_CODE = """
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import ALL_ATTENTION_FUNCTIONS, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class Own(LlamaForCausalLM):
    config_class = OwnConfig
"""


def bring(folder: Path, tokenizer: str | None = None, model: str | None = None) -> None:
    """Put code of its own into a folder, with lines at the end of its class."""
    if tokenizer is not None:
        (folder / "letters.py").write_text(f"{TOKENIZER_CODE}    {tokenizer}\n")
        (folder / "tokenizer.json").unlink()
        about = {"tokenizer_class": "Letters", "auto_map": {"AutoTokenizer": ["letters.Letters", None]}}
        (folder / TOKENIZER).write_text(json.dumps(about))
    if model is not None:
        (folder / "own.py").write_text(f"{MODEL_CODE}    {model}\n")
        edit(
            folder / CONFIG, model_type="own",
            auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
        )  # fmt: skip


FAILS = r"the tokenizer of model '\S+', Letters, fails"
TOKENIZERS = {
    "def __call__(self, *a, **k): raise KeyError('lost')": rf"{FAILS} \(KeyError: 'lost'\)",
    "def _tokenize(self, text, **k): raise SystemExit(3)": rf"{FAILS} \(SystemExit: 3\)",
    "def __call__(self, text): return {'input_ids': [1]}": rf"{FAILS} \(TypeError: .*unexpected keyword",
    "def decode(self, *a, **k): raise IndexError('no such id')": rf"{FAILS} \(IndexError: no such id\)",
    "def decode(self, *a, **k): return b'abc'": "decodes token ids to bytes, not to text",
    "def __call__(self, *a, **k): return [1, 2]": "gives list without input_ids",
    "def __call__(self, *a, **k): return {'input_ids': [[1, 2]]}": "gives no list of token ids",
    "def __call__(self, *a, **k): return {'input_ids': [1.5]}": "gives no list of token ids",
    "def __call__(self, *a, **k): return {'input_ids': [1, -2]}": "gives no list of token ids",
    "def __call__(self, *a, **k): return {'input_ids': []}": "empty once it is tokenised",
    "eos_token_id = property(lambda self: 1 // 0)": "fails in code that it brings along, letters.py line ",
}
RUN = r"model '\S+' cannot be run: "
MODELS = {
    "def forward(self, *a, **k): raise ValueError('other shapes')": rf"{RUN}its class Own fails \(ValueError: other",
    "def forward(self, input_ids): pass": rf"{RUN}forward\(\) of Own does not take attention_mask, position_ids, ",
    "def forward(self, *a, **k): return None": rf"{RUN}forward\(\) of Own gives no logits",
    "def forward(self, *a, cache=None, past_key_values=None, **k): return super().forward(*a, **k)":
        rf"{RUN}forward\(\) of Own puts nothing into the cache",
    "def forward(self, *a, **k): raise SystemExit(5)": rf"{RUN}its class Own fails \(SystemExit: 5\)",
    "def __init__(self, config): raise RuntimeError('of yesterday')": "its weights or code: of yesterday",
    "device = property(lambda self: 1 // 0)": rf"{RUN}its class Own fails \(ZeroDivisionError",
    "def set_attn_implementation(self, *a): raise ValueError('eager alone')":
        r"fails in code that it brings along, own.py line \d+ \(ValueError: eager alone\)",
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("code", TOKENIZERS)
def test_tokenizers_of_own_code(code: str, folder: Path) -> None:
    bring(folder, tokenizer=code)
    assert re.search(TOKENIZERS[code], complaint(folder, *TRUST))


@pytest.mark.nightly
@pytest.mark.parametrize("code", MODELS)
def test_models_of_own_code(code: str, folder: Path) -> None:
    bring(folder, model=code)
    assert re.search(MODELS[code], complaint(folder, *TRUST))


@pytest.mark.nightly
def test_code_that_works_is_run_if_that_is_asked_for(folder: Path) -> None:
    bring(folder, "pass", "pass")
    assert "brings code of its own along for its config.json, which is not run unasked" in complaint(folder)
    assert invoke("generate", folder, "--context", "the calm fox . " * 20, *ASKED, *TRUST)[0] == 0


@pytest.mark.nightly
def test_code_that_needs_a_package(folder: Path) -> None:
    bring(folder, tokenizer="import nobody_has_this")
    assert "pip install nobody_has_this" in complaint(folder, *TRUST, code=ENVIRONMENT)


# --- whose fault an exception is --------------------------------------------------------------------------------------


def test_transformers_is_to_blame_for_its_own_code() -> None:
    """Ids that a model has no rows for: torch raises it, transformers' layer has called torch."""
    model = tiny.loaded().model
    said = r"model 'tiny' fails in transformers, modeling_\w+.py line \d+ \(IndexError"
    with pytest.raises(CheckpointError, match=said), blame_checkpoint("tiny"):
        kvsearch_frame(lambda: model(torch.tensor([[10**6]])))


def kvsearch_frame(call: Callable[[], Any]) -> Any:
    """Call something as kvsearch's own code does."""
    scope: dict[str, Any] = {"__name__": "kvsearch.somewhere", "call": call}
    exec("def enter():\n    return call()", scope)
    return scope["enter"]()


@pytest.mark.parametrize("raised_in", ["kvsearch", "torch", "transformers"])
def test_what_kvsearch_put_into_a_model_is_its_own_fault(raised_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our attention is called by the model's code: a bug of it stays one, also where a library shows it."""
    model = tiny.loaded().model

    def broken() -> None:
        if raised_in == "kvsearch":
            raise ValueError("no")
        if raised_in == "torch":
            torch.zeros(2) @ torch.zeros(3)
        model.set_attn_implementation("nowhere")

    def attend(*_: Any, **__: Any) -> Any:
        return kvsearch_frame(broken)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", attend)
    with pytest.raises(Exception) as caught:
        kvsearch_frame(lambda: model(torch.tensor([[1, 2]])))
    assert find_culprit(caught.value) is None


def test_a_checked_tokenizer_is_the_tokenizer_otherwise() -> None:
    loaded = tiny.loaded()
    again = pickle.loads(pickle.dumps(loaded.tokenizer))
    assert isinstance(loaded.tokenizer, PreTrainedTokenizerBase)
    assert len(again) == len(tiny.tokenizer())
    assert again.eos_token_id == loaded.tokenizer.eos_token_id
    assert again(["the fox", "a"])["input_ids"] == tiny.tokenizer()(["the fox", "a"])["input_ids"]
    assert again("the fox", return_tensors="pt")["input_ids"].shape[0] == 1


def test_a_tokenizer_is_changed_as_ever() -> None:
    loaded = tiny.loaded()
    checked = loaded.tokenizer
    checked.chat_template = tiny.CHAT_TEMPLATE
    assert checked.bare.chat_template == tiny.CHAT_TEMPLATE
    assert pickle.loads(pickle.dumps(checked)).chat_template == tiny.CHAT_TEMPLATE
    assert "recall the fox" in checked.apply_chat_template([{"role": "user", "content": "the fox"}], tokenize=False)
    ids = checked("the fox")["input_ids"]
    assert checked.decode(ids, True) == checked.bare.decode(ids, skip_special_tokens=True)
