"""Models whose weights are not all on a device: they are told apart right after loading, before anything reads them."""

from __future__ import annotations

from typing import Any

from kvsearch.errors import EnvironmentFault

GB = 10**9
SHOWN = 3  # modules that are named


def refuse_offloaded(model: Any, name: str) -> None:
    """Raise EnvironmentFault if weights were left on the host or the disk, as device maps do with what does not fit.

    They are brought one by one while the model runs and are nowhere in between: policies that read a projection, and
    the fingerprint, would find nothing there.
    """
    if not any(one.is_meta for one in model.parameters()):
        return
    sizes = {key: one.numel() * one.element_size() for key, one in model.named_parameters()}
    away = {key: sizes[key] for key, one in model.named_parameters() if one.is_meta}
    missing, whole = (_size(sum(found.values())) for found in (away, sizes))
    places: dict[str, Any] = getattr(model, "hf_device_map", {})
    left = [module for module in places if any(f"{key}.".startswith(f"{module}.") for key in away)]
    more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
    where = f" ({', '.join(left[:SHOWN])}{more})" if left else ""
    raise EnvironmentFault(
        f"model {name!r} does not fit: {missing} of its {whole} of weights were left outside of the device{where}, "
        f"where plans cannot be made or run: free {missing} there, or use more GPUs (--device-map auto), "
        "--dtype bfloat16, a smaller or quantised model, or --device cpu"
    )


def _size(count: int) -> str:
    return f"{count / GB:.1f} GB" if count >= GB / 10 else f"{count / 1e6:.1f} MB"
