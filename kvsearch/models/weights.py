"""Effective weights of a model, whether plain, quantised or wrapped by adapters, and the tensors that hold them.

A quantised projection holds codes, and scales beside them; one with a LoRA adapter holds its base layer and two small
matrices. `module.weight` is neither the map that the layer applies nor all that it holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kvsearch.core.errors import IncompatibleError
from kvsearch.core.parsing import describe_fault

UNIT_BLOCK = 1024  # unit vectors that a projection is applied to at a time
PROBES = 4  # random vectors on which it must agree with the map that was read off unit vectors
# of their outputs, in quadratic mean: activations of 8 bits are off by 3% (fp8 e4m3), of 4 bits by 15%
WEIGHT_TOLERANCE = 0.25
# of what wraps a module: PEFT's layers and whole models, torch.compile, and layers that hold a linear one
WRAPPERS = frozenset({"base_layer", "original_module", "modules_to_save", "linear", "_orig_mod"})
PEFT_MODEL = "base_model.model."
INT8 = "Int8Params"  # parameters of bitsandbytes
INT4 = "Params4bit"


# --- the linear map of a projection ---------------------------------------------------------------------------------


def is_plain(module: nn.Module) -> bool:
    """Tell whether a projection is torch's own linear layer with a matrix of 16 bits or more for its weight.

    Hooks of such a layer are taken for observers: what they change is not part of its map.
    """
    if type(module) is not nn.Linear or ("forward" in vars(module) and not hasattr(module, "_hf_hook")):
        return False
    weight: Any = module.weight
    matrix = type(weight) in (nn.Parameter, Tensor) and weight.dim() == 2
    return matrix and weight.dtype.is_floating_point and weight.dtype.itemsize > 1


def read_effective_weight(module: nn.Module, what: str, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix [out, in] by which a projection maps `inputs` numbers of `dtype`, without its bias.

    For a plain linear layer this is its weight, in its dtype. Layers of bitsandbytes are dequantised, as 8-bit ones
    round their inputs. Any other is applied to unit vectors, which sees scales, codes and adapters; fp32.

    Raises:
        IncompatibleError: it cannot be applied here, or is no linear map; `what` names projection and layer.
    """
    if is_plain(module):
        weight: Tensor = module.weight  # type: ignore[assignment]
        return weight
    try:
        with torch.no_grad():
            weight = _unpack_weight(module, inputs, dtype)
            if not torch.compiler.is_compiling():
                _require_linear(module, weight, inputs, dtype)
    except Exception as error:  # of a library of quantised layers, or of its kernels
        reason = str(error) if isinstance(error, IncompatibleError) else describe_fault(error)
        raise IncompatibleError(
            f"{what} is a {type(module).__name__}, and the linear map that it applies cannot be read: {reason}; take a "
            "policy that does not weigh values by it, or load the model unquantised, with its adapters merged"
        ) from error
    return weight


def read_effective_bias(module: nn.Module, inputs: int, dtype: torch.dtype) -> Tensor | None:
    """Return the bias of a projection, its output for zeros, [out]; None where a plain linear layer has none."""
    if is_plain(module):
        bias: Tensor | None = module.bias  # type: ignore[assignment]
        return bias
    with torch.no_grad():
        return _apply(module, torch.zeros(1, inputs, dtype=dtype), {})[0]


def require_gradients(model: Any, instead: str) -> None:
    """Refuse a model whose layers pass no gradients back, see `passes_gradients`.

    Raises:
        IncompatibleError: that is so; `instead` says what to do.
    """
    if kind := _find_without_gradients(model):
        raise IncompatibleError(f"layers of class {kind} pass no gradients back on {model.device.type}: {instead}")


def passes_gradients(model: Any) -> bool:
    """Return whether gradients pass through all layers (some quantised ones block them); tries one layer per class."""
    return not _find_without_gradients(model)


@torch.enable_grad()
def _find_without_gradients(model: Any) -> str:
    """Return the name of a class of layers that pass no gradients back, empty if there is none."""
    # One layer of each class is enough: a kernel has a backward pass or not.
    kinds = {type(part): part for part in model.modules() if hasattr(part, "in_features") and not is_plain(part)}
    for kind, module in kinds.items():
        try:
            rows = torch.randn(PROBES, module.in_features, generator=torch.Generator().manual_seed(0)).to(model.dtype)
            held = (tensor.device for tensor in chain(module.parameters(), module.buffers()))
            rows = rows.to(next(held, rows.device)).requires_grad_()
            with warnings.catch_warnings():  # kernels without a derivative may say so, and go on
                warnings.simplefilter("ignore")
                [slope] = torch.autograd.grad(module(rows).float().square().sum(), rows, allow_unused=True)
        except (RuntimeError, NotImplementedError):
            slope = None
        if slope is None or not bool(slope.any()):
            return kind.__name__
    return ""


def state_of(module: nn.Module) -> tuple[object, ...]:
    """Return a key that changes with the map of a projection: addresses and versions of its tensors, and adapters."""
    if is_plain(module):
        return (_place(module.weight),)  # type: ignore[arg-type]
    parts: list[object] = []
    for part in module.modules():
        parts += [_place(inner) for tensor in _list_held(part).values() for inner in _list_inner(tensor)]
        if _is_adapted(part):
            parts += [_list_active_adapters(part), str(getattr(part, "scaling", None))]
    return tuple(parts)


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _unpack_weight(module: nn.Module, inputs: int, dtype: torch.dtype) -> Tensor:
    if any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers())):
        raise IncompatibleError("its weights are on no device")
    if any(isinstance(part, nn.Dropout) and part.training and part.p for part in module.modules()):
        raise IncompatibleError("it is in training mode, with dropout: call the model's eval() first")
    if (weight := _dequantise(module)) is not None:
        return weight
    base = module._modules.get("base_layer")
    if base is not None and (weight := _dequantise(base)) is not None:  # and what an adapter adds to it
        return weight + (_apply_to_units(module, inputs, dtype) - _apply_to_units(base, inputs, dtype))
    return _apply_to_units(module, inputs, dtype)


def _dequantise(module: nn.Module) -> Tensor | None:
    """Dequantise the matrix of a bitsandbytes layer to fp32; None for other layers."""
    weight = module._parameters.get("weight")  # that of a wrapper is its base layer's
    kind = type(weight).__name__
    if kind == INT8 and weight.dtype == torch.int8:  # type: ignore[union-attr]
        return weight.data.float() * _read_row_scales(module, weight)[:, None].float() / 127  # type: ignore[union-attr]
    if kind == INT4 and getattr(weight, "quant_state", None) is not None:
        codes, state = _read_four_bits(weight)
        dequantised: Tensor = import_module("bitsandbytes").functional.dequantize_4bit(codes, state)
        return dequantised.float()
    return None


def _read_row_scales(module: Any, weight: Any) -> Tensor:
    """Return what bitsandbytes' 8-bit layers scale rows by; the first forward pass moves it into their state."""
    scales: Tensor = module.state.SCB if weight.SCB is None else weight.SCB
    return scales


def _read_four_bits(weight: Any) -> tuple[Tensor, Any]:
    """Return codes and quantisation state of 4-bit parameters of bitsandbytes, as their quantisation left them.

    On CPUs with AVX512-BF16 the first forward pass arranges both anew, and rounds scales of blocks to bfloat16;
    `state_dict` would turn the codes back, and leave the scales of blocks where they are.
    """
    state = weight.quant_state
    if not getattr(state, "packing_format_for_cpu", False):
        return weight.data, state
    scales = state.absmax.T.float().reshape(-1)
    plain = copy(state)
    plain.original_nested = False  # a second quantisation of scales that were one is not wanted
    codes, plain = import_module("bitsandbytes.functional")._convert_weight_packed_for_cpu_inverse(weight.data, plain)
    plain.absmax = scales
    plain.nested = False
    return codes, plain


def _apply_to_units(module: nn.Module, inputs: int, dtype: torch.dtype) -> Tensor:
    """Apply a module to unit vectors; returns its matrix [out, in] fp32."""
    biases = _zero_biases(module)
    # A map of zeros is the constant that some layers add without calling it a bias.
    rest = _apply(module, torch.zeros(1, inputs, dtype=dtype), biases)
    rows = []
    for first in range(0, inputs, UNIT_BLOCK):
        units = torch.zeros(min(UNIT_BLOCK, inputs - first), inputs, dtype=dtype)
        units[:, first:].fill_diagonal_(1.0)
        rows.append(_apply(module, units, biases) - rest)
    return torch.cat(rows).T


def _zero_biases(module: nn.Module) -> dict[str, Tensor]:
    """Return zeros in the place of a module's biases: added to a large one, the products would be rounded."""
    named = chain(module.named_parameters(), module.named_buffers())
    return {name: torch.zeros_like(bias) for name, bias in named if name.split(".")[-1] == "bias" and bias.dim() == 1}


def _apply(module: nn.Module, rows: Tensor, replaced: Mapping[str, Tensor]) -> Tensor:
    """Apply a module to rows [N, in], with some of its tensors replaced; [N, out] fp32."""
    held = (tensor.device for tensor in chain(module.parameters(), module.buffers()))
    given = rows.to(next(held, rows.device))
    output: Tensor = functional_call(module, dict(replaced), (given,)) if replaced else module(given)
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(rows):
        raise IncompatibleError(f"it makes no matrix of one of the shape {tuple(rows.shape)}")
    return output.float()


def _require_linear(module: nn.Module, weight: Tensor, inputs: int, dtype: torch.dtype) -> None:
    """Refuse a matrix that has not the shape of the map, is not finite, or is not what the module applies."""
    if weight.dim() != 2 or weight.shape[1] != inputs:
        raise IncompatibleError(f"it has the shape {tuple(weight.shape)} for {inputs} inputs")
    if not bool(weight.isfinite().all()):
        raise IncompatibleError("it has NaN or infinite values")
    rows = torch.randn(PROBES, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    biases = _zero_biases(module)
    applied = _apply(module, rows, biases) - _apply(module, torch.zeros_like(rows[:1]), biases)
    expected = rows.to(weight.device, torch.float32) @ weight.T
    if not bool((applied - expected).norm() <= WEIGHT_TOLERANCE * expected.norm() + 1e-6):
        raise IncompatibleError("what it makes of other vectors does not follow from what it makes of unit vectors")


# --- all that a model holds -----------------------------------------------------------------------------------------


def list_named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors that weights of a model are held in, each once: codes, scales, adapters, all there is."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, tensor in _list_contents(module, seen):
            yield clean_name(f"{path}.{name}" if path else name), tensor


def is_finite(tensor: Tensor) -> bool:
    """Tell whether no number of a tensor is NaN or infinite; codes are none, and float8 is looked at in float32."""
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def count_stored_bytes(modules: Iterable[nn.Module]) -> int:
    """Count the bytes of the modules' own weights, submodules left out; quantised ones as they are stored."""
    seen: set[int] = set()
    return sum(tensor.nbytes for module in modules for _, tensor in _list_contents(module, seen))


def count_numbers(modules: Iterable[nn.Module]) -> int:
    """Count the numbers that the modules' own weights stand for, submodules left out."""
    seen: set[int] = set()
    total = 0
    for module in modules:
        held = [tensor for _, tensor in _list_contents(module, seen)]
        width = getattr(module, "in_features", None)
        if held and isinstance(width, int) and not is_plain(module):
            total += width * int(module.out_features)  # type: ignore[arg-type]
        else:
            total += sum(tensor.numel() for tensor in held)
    return total


def list_effective_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors that determine a model's outputs, by names without wrappers and adapter labels.

    Adapters that are not active, or merged already, are left out; of the others their scaling is a tensor, too.
    """
    yield from _list_effective(model, "", set())


def _list_effective(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in _list_contents(module, seen):
        yield clean_name(path + name), tensor
    active = _list_active_adapters(module) if _is_adapted(module) else ()
    labels = {label: str(place) for place, label in enumerate(active)}
    scaling = getattr(module, "scaling", None)
    for label, place in labels.items():
        if isinstance(scaling, Mapping) and isinstance(scaling.get(label), int | float):
            yield clean_name(f"{path}scaling.{place}"), torch.tensor(float(scaling[label]))
    copies: Any = module._modules.get("modules_to_save")
    replaced = [label for label in labels if copies is not None and label in copies]
    for name, child in module.named_children():
        if name == "original_module" and replaced:
            continue
        if not _is_adapted(module) or not isinstance(child, nn.ModuleDict | nn.ParameterDict):
            yield from _list_effective(child, f"{path}{name}.", seen)
            continue
        prefix = f"{path}{name}."
        for label, place in labels.items():
            if label in child:
                here: Any = child[label]
                if isinstance(here, nn.Module):
                    yield from _list_effective(here, prefix if replaced else f"{prefix}{place}.", seen)
                else:
                    yield clean_name(f"{prefix}{place}"), here.detach()


def clean_name(name: str) -> str:
    """Return a tensor's name without the names of wrappers."""
    parts = name.removeprefix(PEFT_MODEL).split(".")
    return ".".join(part for part in parts if part not in WRAPPERS)


def _list_contents(module: nn.Module, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own plain tensors, submodules left out, that are not in `seen` yet."""
    for name, tensor in _list_held(module).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        kind = type(tensor).__name__
        if kind == INT4 and getattr(tensor, "quant_state", None) is not None:
            codes, state = _read_four_bits(tensor)
            scales = state.absmax
            if state.nested:
                functions = import_module("bitsandbytes").functional
                scales = functions.dequantize_blockwise(scales, state.state2) + state.offset
            yield name, codes.reshape(-1).view(torch.uint8)
            yield f"{name}.absmax", scales
            yield f"{name}.code", state.code
            continue
        if kind == INT8 and tensor.dtype == torch.int8:
            yield f"{name}.SCB", _read_row_scales(module, tensor)
        inner = list(_list_inner(tensor))
        yield from ((name if len(inner) == 1 else f"{name}.{place}", part) for place, part in enumerate(inner))


def _list_held(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters; buffers where its matrices are such, and tensors that it holds beside them."""
    held: dict[str, Tensor] = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    buffers = {
        name: tensor
        for name, tensor in module._buffers.items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    }
    if any(tensor.dim() > 1 for tensor in buffers.values()) and not module._modules:
        held |= buffers
    if hasattr(module, "in_features") and not is_plain(module):
        held |= dict(_list_in_tables(vars(module)))
    return held


def _list_in_tables(attributes: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in dictionaries that are attributes, as scales and zero points of HQQ's layers in their `meta`."""
    for name, value in attributes.items():
        if isinstance(value, Tensor) and path:  # others are made as they are needed
            yield f"{path}{name}", value
        elif isinstance(value, dict) and not str(name).startswith("_"):
            yield from _list_in_tables(value, f"{path}{name}.")


def _list_inner(tensor: Any) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor is made of: itself, or those that a subclass such as torchao's holds."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor.detach()
        return
    for name in tensor.__tensor_flatten__()[0]:
        if (part := getattr(tensor, name)) is not None:
            yield from _list_inner(part)


def _is_adapted(module: nn.Module) -> bool:
    """Tell whether a module is one that PEFT put around another."""
    return hasattr(type(module), "merged_adapters")


def _list_active_adapters(module: Any) -> tuple[str, ...]:
    """Return the adapters that a module of PEFT applies beside what it wraps, in their order."""
    active = getattr(module, "active_adapters", None) or getattr(module, "active_adapter", None) or ()
    active = (active,) if isinstance(active, str) else tuple(active)
    return (
        () if module.disable_adapters else tuple(adapter for adapter in active if adapter not in module.merged_adapters)
    )
