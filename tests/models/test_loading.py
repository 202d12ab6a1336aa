"""Loading: what arrives, and one clear error for everything that cannot be loaded."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file

from kvsearch.core.errors import EnvironmentFault, IncompatibleError, KvsearchError, KvsearchWarning, UsageError
from kvsearch.models import loading
from kvsearch.models.loading import LoadOptions, load
from tests import tiny
from tests.families import FAMILIES

OFFLINE = LoadOptions(offline=True)
WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the network, whatever it asks for."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    model = tiny.loaded()
    model.model.save_pretrained(path)
    model.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "broken"))


def refusal(name: str | Path, kind: type[KvsearchError], options: LoadOptions | None = None) -> str:
    with pytest.raises(KvsearchError) as caught:
        load(str(name), options)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_comes_back(family: str, tmp_path: Path) -> None:
    """Of every family: with and without tied embeddings, no weight is reported missing."""
    model = tiny.loaded(family)
    model.model.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    found = load(str(tmp_path))
    assert found.name == found.fingerprint.name == str(tmp_path)
    assert found.fingerprint.mismatch(model.fingerprint) is None
    assert found.fingerprint.revision is None
    assert not found.model.training
    assert str(found.device) == "cpu"
    ids = tiny.ids_of("the calm fox .")
    if family == "llama":  # transformers gives some families a tokenizer of their own
        assert found.tokenizer("the calm fox .")["input_ids"] == ids[0].tolist()
    with torch.no_grad():
        assert torch.allclose(found.model(ids).logits, model.model(ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "got"), [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_dtypes(asked: str, got: torch.dtype, saved: Path) -> None:
    found = load(str(saved), LoadOptions(dtype=asked, device="cpu"))
    assert found.model.dtype == got
    assert found.fingerprint.mismatch(tiny.loaded().fingerprint) is None


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("someone/some-model", UsageError, "there is no directory someone/some-model, and no downloaded model"),
        ("no-such-model", UsageError, "of that name: check the spelling, or leave --offline out"),
        ("/no/such/directory", UsageError, "there is no model '/no/such/directory': check the path of its directory"),
        ("what is this?", UsageError, "there is no model 'what is this?': check the path of its directory"),
    ],
)
def test_a_model_that_is_not_here(name: str, error: type[KvsearchError], words: str) -> None:
    assert words in refusal(name, error, OFFLINE)


@pytest.mark.parametrize(
    ("raised", "error", "words"),
    [
        (ConnectionError("no route"), EnvironmentFault, "and the hub does not answer: check the network (no route)"),
        (
            RepositoryNotFoundError("404", response=Mock()),
            UsageError,
            "nor is there one on the hub that you may read: check",
        ),
    ],
)
def test_a_model_that_the_hub_does_not_give(
    raised: Exception, error: type[KvsearchError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.model_info", Mock(side_effect=raised))
    assert words in refusal("someone/some-model", error, LoadOptions())


def test_a_device_that_pytorch_is_not_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "read_version", lambda _: "2.13.0+cpu")
    loading.check_device("auto")
    with pytest.raises(
        EnvironmentFault, match=r"'cuda:1' was asked for, but PyTorch 2.13.0\+cpu here is built for CPU"
    ):
        loading.check_device("cuda:1")


@pytest.mark.parametrize("refuse", [loading.check_device, loading.require_device])
def test_a_device_without_float64(refuse: Any) -> None:
    with pytest.raises(EnvironmentFault, match=r"'mps' has no float64, .*: run with --device cpu"):
        refuse("mps:0")


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    assert "has no config.json" in refusal(tmp_path, IncompatibleError)
    (tmp_path / "plan.json").write_text("{}")
    assert "plan.json' has no config.json" in refusal(tmp_path / "plan.json", IncompatibleError)


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        found = load_file(path / WEIGHTS)
        change(found)
        save_file(found, path / WEIGHTS, {"format": "pt"})

    return damage


def config(**changes: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        found = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**found, **changes}))

    return damage


def halve(path: Path) -> None:
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data[: len(data) // 2])


def without_tokenizer(path: Path) -> None:
    for file in path.glob("tokenizer*"):
        file.unlink()


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated weights": (halve, "cannot be loaded: .*not fully covered"),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), "cannot be loaded: .*no file named model.safetensors"),
    "NaN": (
        tensors(lambda found: found["model.layers.2.mlp.up_proj.weight"][0].fill_(float("nan"))),
        r"has NaN or infinite values in model\.layers\.2\.mlp\.up_proj\.weight",
    ),
    "a missing tensor": (
        tensors(lambda found: found.pop("model.layers.1.mlp.up_proj.weight")),
        r"lacks 1 of its weights, such as model\.layers\.1\.mlp\.up_proj\.weight",
    ),
    "broken JSON": (lambda path: (path / "config.json").write_text("{"), "cannot be loaded: .*not a valid JSON"),
    "no model type": (lambda path: (path / "config.json").write_text("{}"), "cannot be loaded: .*Unrecognized model"),
    "an impossible shape": (config(num_attention_heads=7), "cannot be loaded: "),
    "an encoder-decoder": (config(model_type="t5"), "cannot be loaded: .*Unrecognized configuration class"),
    "no tokenizer": (without_tokenizer, "cannot be loaded: .*tokenizer"),
    "a broken tokenizer": (lambda path: (path / "tokenizer.json").write_text("{"), "cannot be loaded: "),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_directories(damage: str, copy: Path) -> None:
    change, problem = DAMAGES[damage]
    change(copy)
    message = refusal(copy, IncompatibleError)
    assert re.search(problem, message)
    assert repr(str(copy)) in message


def test_an_architecture_that_cannot_be_planned(copy: Path) -> None:
    config(layer_types=["sliding_attention"] * 4, model_type="qwen3", sliding_window=8, use_sliding_window=True)(copy)
    weights = tensors(
        lambda found: found.update(
            {f"model.layers.{i}.self_attn.{n}_norm.weight": torch.ones(16) for i in range(4) for n in "qk"}
        )
    )
    weights(copy)
    assert "no full-attention layer" in refusal(copy, IncompatibleError)


@pytest.mark.parametrize("device", ["cpuu", "meta", "cuda:99"])
def test_devices_that_are_none(device: str, saved: Path) -> None:
    assert f"device {device!r} was asked for" in refusal(saved, EnvironmentFault, LoadOptions(device=device))


@pytest.mark.parametrize(
    ("free", "place"), [((1e9, 2e9), "cuda:1"), ((2e9,), "cuda:0"), ((1e4,), "auto"), ((1e5, 2e5), "auto")]
)
def test_the_gpu_with_most_room_holds_the_whole_model(
    free: tuple[float, ...], place: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    places: list[str] = []
    from_pretrained = transformers.AutoModelForCausalLM.from_pretrained

    def placed(*args: Any, device_map: str, **options: Any) -> Any:
        places.append(device_map)
        return from_pretrained(*args, device_map="cpu", **options)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free[device.index]), 10**12))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", placed)
    said = r"is spread over all GPUs.* cuda:1 has 0\.0 GB free \(--device cuda:1"
    with pytest.warns(KvsearchWarning, match=said) if free == (1e5, 2e5) else nullcontext():
        load(str(saved))
    assert places == [place]


def test_running_out_of_memory_is_not_the_models_fault(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", Mock(side_effect=full))
    with pytest.raises(torch.OutOfMemoryError):
        load(str(saved))


def test_the_revision_of_a_hub_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    snapshot = "/cache/models--a--b/snapshots/0123abc/config.json"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: snapshot)
    assert loading._read_revision("a/b", LoadOptions(revision="v1")) == "0123abc"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    assert loading._read_revision("a/b", LoadOptions(revision="v1")) == "v1"
