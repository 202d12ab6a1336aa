"""Load a model and its tokenizer: a hub id, a local directory, a GGUF file, or the name of a model known here."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvsearch.core.errors import EnvironmentFault, IncompatibleError, KvsearchError, UsageError, warn_once
from kvsearch.core.limits import MOST_LAYERS
from kvsearch.core.naming import require_known, suggest_nearest
from kvsearch.core.parsing import describe_fault, read_json
from kvsearch.core.printed import truncate
from kvsearch.core.resources import find_resource, read_version
from kvsearch.models.foreign import CheckedTokenizer, count_embeddings, require_contract
from kvsearch.models.gguf import GGUF_SUFFIX as GGUF
from kvsearch.models.gguf import check_gguf, is_gguf, make_loading_arguments, make_ordinary, read_once
from kvsearch.models.memory import (
    estimate_reading_memory,
    find_accelerator,
    find_best_device,
    has_bfloat16,
    is_out_of_memory,
    measure_free_bytes,
    refuse_offloaded,
)
from kvsearch.models.real import REAL_MODELS

if TYPE_CHECKING:
    from kvsearch.plan import ModelFingerprint

Given = TypeVar("Given")
Made = TypeVar("Made")
Work = Callable[["LoadedModel", Given], Made]  # what is made of one of many items; workers must be able to import it

BUNDLED = ("bundled", "bundled-redundant")  # names of the models in data/
SHORT_NAMES = (*BUNDLED, *REAL_MODELS)
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")  # that PyTorch may bring; there are others
NO_FLOAT64 = ("mps",)
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
MODEL_CONFIG_FILE = "config.json"
ADAPTER = "adapter_config.json"  # of what PEFT saves: an adapter without its model
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
MIN_PROMPT_ROOM = 32_768  # tokens of a prompt that a GPU must have room for beside the weights to hold a model alone


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded: where to, in which numbers, and what may be fetched or run for it.

    Args:
        device: auto, cpu, cuda, cuda:1 or another device of PyTorch.
        device_map: one of `DEVICE_MAPS` spreads the model over several GPUs.
        dtype: one of `DTYPE_NAMES`.
        revision: a branch, tag or commit of a hub model.
        trust_remote_code: whether code that a model brings along is run.
        offline: whether the network is never touched.

    Raises:
        UsageError: an unknown dtype or device map, or a device map beside a device.
    """

    device: str = "auto"
    device_map: str | None = None
    dtype: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    offline: bool = False

    def __post_init__(self) -> None:
        if self.device_map is not None:
            require_known("device map", self.device_map, DEVICE_MAPS)
            if self.device != "auto":
                raise UsageError("give either --device or --device-map, not both")
        require_known("dtype", self.dtype, DTYPE_NAMES)


class Workers(Protocol):
    """Other processes that have loaded the same model; see `kvsearch.workers.models.ModelWorkers`."""

    def map(self, work: Work[Given, Made], items: Sequence[Given]) -> Iterator[Made]:
        """Yield what `work` makes of each item, in their order."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be calibrated or run, under the attention implementation it was loaded with.

    `workers` have loaded it, too, if there are any. `remark` says in which dtype it is and why, where that was not
    asked for and is not float32 as in its files.
    """

    name: str
    model: Any
    tokenizer: Any
    fingerprint: ModelFingerprint
    workers: Workers | None = field(default=None, compare=False, repr=False)
    remark: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        """Wrap the tokenizer in a `CheckedTokenizer`."""
        if self.tokenizer is not None:
            bare = getattr(self.tokenizer, "bare", self.tokenizer)
            checked = CheckedTokenizer(bare, self.name, count_embeddings(self.model))
            object.__setattr__(self, "tokenizer", checked)

    def map(self, work: Work[Given, Made], items: Sequence[Given]) -> Iterator[Made]:
        """Yield what `work` makes of each item, in their order: here one after the other, or by the workers.

        What is made depends on model and item alone, so it is the same by whomever it is made; an iterator comes from
        a worker as a list. A work holds no model.
        """
        if self.workers is not None:
            yield from self.workers.map(work, items)
            return
        for item in items:
            yield work(self, item)

    @cached_property
    def tokenizer_sha256(self) -> str:
        """What `hash_tokenizer` says of the tokenizer, computed once: large vocabularies take a second."""
        from kvsearch.models.fingerprint import hash_tokenizer

        return hash_tokenizer(self.tokenizer)

    @property
    def device(self) -> Any:
        """Where inputs go."""
        return self.model.device


def from_loaded(model: Any, tokenizer: Any) -> LoadedModel:
    """Wrap a model of transformers that is loaded already, under the name in its configuration.

    Raises:
        TypeError: the tokenizer is missing.
        IncompatibleError: the model is in training mode; see also `compute_fingerprint`.
        EnvironmentFault: it is on a device without float64.

    Examples:
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from kvsearch.core.resources import find_resource
        >>> place = find_resource("data/bundled")
        >>> model = AutoModelForCausalLM.from_pretrained(place)
        >>> from_loaded(model, AutoTokenizer.from_pretrained(place)).fingerprint.head_dim
        16
    """
    from kvsearch.models.architecture import name_of
    from kvsearch.models.fingerprint import compute_fingerprint

    if tokenizer is None:
        raise TypeError("a loaded model needs its tokenizer: give it as tokenizer=...")
    if model.training:
        raise IncompatibleError("the model is in training mode: call its eval() first")
    _require_float64(model.device.type)
    name = name_of(model)
    require_contract(model, name)
    return LoadedModel(name, model, tokenizer, compute_fingerprint(model, name))


def load(name: str, options: LoadOptions | None = None, weights: bool = True) -> LoadedModel:
    """Load `name`; the fingerprint is taken right away.

    Without `weights` its configuration and tokenizer are loaded, which are enough to say what something would cost; the
    fingerprint has the hash of no weights then.

    Raises:
        UsageError: the name is that of a bundled model but for its spelling, or a directory that is not there.
        IncompatibleError: unknown architecture, no tokenizer, missing, NaN or infinite weights.
        EnvironmentFault: no such model here (and no network), no such device, or too little room on it.

    Examples:
        >>> loaded = load("bundled")
        >>> loaded.model.config.model_type, loaded.fingerprint.layers, loaded.fingerprint.kv_heads
        ('llama', 6, 4)
    """
    options = options or LoadOptions()
    source = find_source(name, options)
    with read_once() if is_gguf(source) else nullcontext():
        return _load_source(name, source, options, weights)


def _load_source(name: str, source: str, options: LoadOptions, weights: bool) -> LoadedModel:
    """Load the model `name` from a directory, a file or the hub; arguments and errors as for `load`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import GENERATION_CONFIG_NAME, cached_file

    from kvsearch.models.fingerprint import compute_fingerprint
    from kvsearch.models.weights import is_finite, list_named_tensors

    if weights and options.device != "auto":
        require_device(options.device)
    is_local = Path(source).exists()
    common: dict[str, Any] = {
        "revision": options.revision or "main",
        "trust_remote_code": options.trust_remote_code,
        "local_files_only": options.offline or is_local,
    }
    how: dict[str, Any] = {}
    file = Path(source) if is_gguf(source) else None
    if file is not None:
        source, common["gguf_file"] = str(file.parent), file.name
        how = make_loading_arguments(file)

    def checkpoint(part: str) -> AbstractContextManager[None]:
        return _load_part(name, source, options, part if file is None else "its file (is it whole?)")

    with checkpoint(f"its {MODEL_CONFIG_FILE}"):
        config = AutoConfig.from_pretrained(source, **common)
        layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
        if isinstance(layers, int) and not 1 <= layers <= MOST_LAYERS:  # they would be made one by one
            raise IncompatibleError(f"model {name!r} has {layers} layers: 1 to {MOST_LAYERS} can be served")
    if file is not None:  # a parse of the file takes seconds
        how["config"] = config
    with checkpoint("its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, **common)
    with checkpoint(f"its {GENERATION_CONFIG_NAME}"):  # transformers would go on without one that it cannot read
        path = cached_file(
            source, GENERATION_CONFIG_NAME, revision=common["revision"], local_files_only=common["local_files_only"],
            _raise_exceptions_for_gated_repo=False, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )  # fmt: skip
        if path is not None and not isinstance(json.loads(Path(path).read_bytes()), dict):
            raise ValueError("it must be an object")
    dtype, remark = (options.dtype, "") if options.dtype != "auto" else _choose_dtype(name, options, config, file)
    with checkpoint("its weights or code"):
        if weights:
            place = options.device_map or options.device
            if options.device_map is None and options.device == "auto":
                place = _choose_device(name, options)
            model, info = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, device_map=place, output_loading_info=True, **common, **how,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )  # fmt: skip
            _require_all(name, info)
        else:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=options.trust_remote_code)
            model = model.to(getattr(torch, dtype) if dtype != "auto" else config.dtype or torch.float32)
    require_contract(model, name, weights)
    model.eval()
    model.config.name_or_path = name
    if file is not None:
        make_ordinary(model)
    if weights:
        refuse_offloaded(model, name)
        supported = getattr(find_accelerator(model.device), "is_bf16_supported", None)
        if model.dtype == torch.bfloat16 and supported is not None and not supported(including_emulation=False):
            raise EnvironmentFault(  # the device would only imitate it, many times slower
                f"{model.device} does not compute in bfloat16, in which model {name!r} is: give --dtype float16 or "
                "float32"
            )
        for tensor_name, tensor in list_named_tensors(model):
            if not is_finite(tensor):
                raise IncompatibleError(
                    f"model {name!r} has NaN or infinite values in {tensor_name}: the file is damaged"
                )
    identity = compute_fingerprint(model, name, _read_revision(source, options), weights)
    return LoadedModel(name, model, tokenizer, identity, remark=remark)


@contextmanager
def _load_part(name: str, source: str, options: LoadOptions, part: str) -> Iterator[None]:
    """Turn errors while a part of a model is loaded into one line that names the part.

    Raises:
        EnvironmentFault: it is not here, or a package that it needs is missing.
        IncompatibleError: it is damaged, which shows as any exception of transformers, safetensors, huggingface_hub or
            Python itself, or its own code must not be run.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error) or isinstance(error, KvsearchError):
            raise
        if not options.trust_remote_code and "trust_remote_code" in str(error):
            raise IncompatibleError(
                f"model {name!r} brings code of its own along for {part}, which is not run unasked: read it, then "
                "give --trust-remote-code"
            ) from error
        is_away = isinstance(error, OSError) and not Path(source).exists()
        kind = EnvironmentFault if is_away or isinstance(error, ImportError) else IncompatibleError
        raise kind(f"model {name!r} cannot be loaded: {part}: {describe_fault(error)}") from error


def _require_all(name: str, info: Mapping[str, Any]) -> None:
    """Refuse a model if transformers initialised some weights at random, as they were missing or misshapen."""
    if missing := sorted(info["missing_keys"]):
        listed = ", ".join(missing[:3])
        raise IncompatibleError(f"model {name!r} lacks {len(missing)} of its weights, such as {listed}")
    for weight, stored, wanted in sorted(info.get("mismatched_keys", ())):
        raise IncompatibleError(
            f"model {name!r} cannot be loaded: {weight} is {list(stored)} in its files, and {list(wanted)} by its "
            f"{MODEL_CONFIG_FILE}: one of them belongs to another model"
        )


def _choose_dtype(name: str, options: LoadOptions, config: Any, file: Path | None) -> tuple[str, str]:
    """Choose the default dtype to load a model in, with a remark on the choice; "auto" is the files' dtype.

    On a processor that multiplies matrices of bfloat16, weights of 16 bits or of a GGUF `file` are in that.
    """
    import torch

    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    kind = find_best_device() if options.device == "auto" else options.device
    if options.device_map is not None or not kind.startswith("cpu") or getattr(config, "quantization_config", None):
        return "auto", ""
    if file is None and stored not in (torch.bfloat16, torch.float16):
        return "auto", ""
    weights = "quantised" if file is not None else f"stored in {str(stored).removeprefix('torch.')}"
    if has_bfloat16():
        return "bfloat16", (
            f"{name}: in bfloat16, as its weights are {weights} and this processor computes in bfloat16 (--dtype "
            "float32 is more exact, and slower)"
        )
    if file is not None:
        return "float32", f"{name}: in float32, as this processor does not compute in bfloat16"
    return "auto", f"{name}: {weights}, which this processor imitates (--dtype float32 is faster, in twice the memory)"


def _choose_device(name: str, options: LoadOptions) -> str:
    """Return the GPU with the most free memory if a model fits there, "auto" if it must be spread, else "cpu".

    It fits with what a prompt of `MIN_PROMPT_ROOM` tokens takes under the full cache.
    """
    import torch

    from kvsearch.models.architecture import describe

    if (device := find_best_device()) == "cpu":
        return device
    model = load(name, options, weights=False).model
    shape = describe(model)
    cache = MIN_PROMPT_ROOM * 2 * shape.layers * shape.kv_heads * shape.head_dim * model.dtype.itemsize
    needs = estimate_reading_memory(model, [MIN_PROMPT_ROOM], cache)
    if getattr(model.config, "quantization_config", None) is not None:  # to a byte each at most
        needs = replace(needs, weights=sum(parameter.numel() for parameter in model.parameters()))
    needed = needs.total
    if needed <= (free := measure_free_bytes(torch.device(device))):
        return device
    if torch.cuda.device_count() > 1:
        warn_once(
            f"model {name!r} is spread over all GPUs: with the cache of {MIN_PROMPT_ROOM:,} tokens "
            f"it takes {needed / 1e9:.1f} "
            f"GB, and {device} has {free / 1e9:.1f} GB free (--device {device} puts it there nevertheless)"
        )
    return "auto"


def find_source(name: str, options: LoadOptions) -> str:
    """Return the directory or hub id of a model that is there, before anything that computes is imported.

    Raises:
        UsageError: there is no such model here, nor on the hub unless that is not to be asked.
        IncompatibleError: a directory without a configuration, a GGUF file that cannot be one.
        EnvironmentFault: the hub does not answer.
    """
    if name in BUNDLED:
        return str(find_resource(f"data/{name}"))
    path = Path(name)
    if not path.exists() and (real := REAL_MODELS.get(name)) is not None:
        if not real.is_here:
            raise EnvironmentFault(f"model {name!r} was not fetched yet: {real.advice}")
        name, path = str(real.path), real.path
    if is_gguf(path):
        check_gguf(path)
        return name
    if path.exists():
        _refuse_adapter(name, path)
        if not (path / MODEL_CONFIG_FILE).is_file():
            raise IncompatibleError(
                f"{name!r} has no {MODEL_CONFIG_FILE}, so it is not the directory of a Hugging Face model"
            )
        return name
    if path.suffix.lower() == GGUF:
        raise UsageError(f"there is no file {name}: check the path")
    near = "" if "/" in name else suggest_nearest(name, SHORT_NAMES, 0.8)
    if near or not HUB_ID.fullmatch(name):
        raise UsageError(f"there is no model {name!r}{near or ': check the path of its directory'}")
    from huggingface_hub import constants, model_info, try_to_load_from_cache
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(try_to_load_from_cache(name, MODEL_CONFIG_FILE, revision=options.revision), str):
        return name
    nowhere = f"there is no directory {name}, and no downloaded model of that name"
    if options.offline or constants.HF_HUB_OFFLINE:
        raise UsageError(f"{nowhere}: check the spelling, or leave --offline out (and HF_HUB_OFFLINE)")
    try:
        files = {file.rfilename for file in model_info(name, revision=options.revision).siblings or ()}
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        revision = "" if options.revision is None else f" with revision {options.revision}"
        raise UsageError(
            f"{nowhere}, nor is there one on the hub{revision} that you may read: check the name"
        ) from error
    except Exception as error:  # of the hub, of its HTTP library, of the network
        reason = describe_fault(error)
        raise EnvironmentFault(f"{nowhere}, and the hub does not answer: check the network ({reason})") from error
    if ADAPTER in files and MODEL_CONFIG_FILE not in files:
        raise IncompatibleError(f"{name!r} is {_MERGE.format(base='a model', path=name)}")
    return name


_LONGEST_NAME = 200
_MERGE = (
    "an adapter (LoRA or another of PEFT's) of {base}, without that model's weights: merge it, in Python, by "
    "peft.AutoPeftModelForCausalLM.from_pretrained({path!r}).merge_and_unload().save_pretrained(FOLDER), with the "
    "tokenizer beside it, or load it with PEFT and give that model to kvsearch's functions"
)


def _refuse_adapter(name: str, path: Path) -> None:
    """Refuse a folder that holds no more than an adapter, or one beside a model that would be left out unseen."""
    if not (path / ADAPTER).is_file():
        return
    if not (path / MODEL_CONFIG_FILE).is_file():
        stated = read_json(path / ADAPTER)
        base = stated.get("base_model_name_or_path") if isinstance(stated, dict) else None
        of = f"the model {truncate(repr(base), _LONGEST_NAME)}" if base else "a model that it does not name"
        raise IncompatibleError(f"{name!r} is {_MERGE.format(base=of, path=name)}")
    if find_spec("peft") is None:  # with it transformers puts the adapter on the model
        raise EnvironmentFault(
            f"{name!r} holds an adapter ({ADAPTER}) beside the model, and without the package peft it would be left "
            f"out: pip install peft, or move {ADAPTER} away if the model alone is wanted"
        )


def check_device(device: str) -> None:
    """Raise the error of a device that cannot be here, as far as that is known before anything that computes."""
    kind = device.partition(":")[0]
    if kind not in DEVICES and (near := suggest_nearest(kind, DEVICES, 0.75)):
        raise UsageError(f"unknown device {device!r}{near}")
    _require_float64(kind)
    if kind == "cuda" and (release := read_version("torch")).endswith("+cpu"):
        raise EnvironmentFault(f"device {device!r} was asked for, but PyTorch {release} here is built for CPUs alone")


def require_device(device: str) -> None:
    """Raise EnvironmentFault unless this machine has a device of that name, such as "cuda:1"."""
    import torch

    _require_float64(device.partition(":")[0])
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = describe_fault(error)
        raise EnvironmentFault(f"device {device!r} was asked for, but this machine has none: {reason}") from error


def _require_float64(kind: str) -> None:
    """Raise EnvironmentFault for a kind of device without float64, in which losses, fits and some policies compute."""
    if kind in NO_FLOAT64:
        raise EnvironmentFault(f"device {kind!r} has no float64, in which kvsearch computes: run with --device cpu")


def _read_revision(source: str, options: LoadOptions) -> str | None:
    """Return the commit of a hub model; None for local directories (config._commit_hash is gone in transformers 5)."""
    if Path(source).exists():
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(source, "config.json", revision=options.revision or "main")
    return Path(cached).parent.name if isinstance(cached, str) else options.revision


# of huggingface_hub, transformers and datasets, which read them when they are imported
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
IMPORTED = ("huggingface_hub.constants", "datasets.config")


@contextmanager
def stay_offline(wanted: bool) -> Iterator[None]:
    """Keep huggingface_hub and datasets offline in this context, whether they are imported yet or not."""
    if not wanted:
        yield
        return
    before = {name: os.environ.get(name) for name in OFFLINE_VARIABLES}
    modules = {name: sys.modules[name] for name in IMPORTED if name in sys.modules}
    states = {name: module.HF_HUB_OFFLINE for name, module in modules.items()}
    os.environ.update(dict.fromkeys(OFFLINE_VARIABLES, "1"))
    for module in modules.values():
        module.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        offline = any((value or "").upper() in ("1", "ON", "YES", "TRUE") for value in before.values())
        for name in IMPORTED:
            if name in sys.modules:  # imported meanwhile: it has read our variables
                sys.modules[name].HF_HUB_OFFLINE = states.get(name, offline)  # type: ignore[attr-defined]
