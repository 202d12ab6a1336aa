"""Errors of code that a checkpoint brings along are reported as the checkpoint's, not as bugs of kvsearch.

A tokenizer is called through `CheckedTokenizer`. Of everything else, the model's code above all, the traceback tells
whose fault an exception is: see `find_culprit`.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvsearch.core.errors import IncompatibleError, KvsearchError
from kvsearch.core.parsing import format_error, format_value
from kvsearch.core.resources import read_version
from kvsearch.models.memory import is_out_of_memory

LIBRARY = "transformers"
REMOTE = "transformers_modules"  # the package in which transformers puts the code that checkpoints bring along
SAID = (KvsearchError, OSError)  # errors that say themselves what is wrong, whoever raises them
_MOST_NAMED = 3
_CALLED_WITH = ("input_ids", "attention_mask", "position_ids", "logits_to_keep")


class CheckpointError(IncompatibleError):
    """Code or a template that a checkpoint brings along fails, or gives what it should not."""


@contextmanager
def blame_checkpoint(name: str) -> Iterator[None]:
    """Turn exceptions from transformers or a checkpoint's code into a `CheckpointError` about the model `name`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if (place := find_culprit(error)) is None:
            raise
        raise CheckpointError(
            f"model {name!r} fails in {place} ({format_error(error)}): check whether it runs by itself with "
            f"transformers {read_version(LIBRARY)}"
        ) from error


def find_culprit(error: BaseException) -> str | None:
    """Find the line of transformers or of a checkpoint's code that raised an exception; None for other code.

    To blame is what the traceback ends in, frames of other packages not counted, if it is one of these:

    - The last frame is the checkpoint's code, or torch called from it.
    - The last frame is transformers, or torch called from it, and no kvsearch frame lies between: an attention
      function or a cache of kvsearch that misbehaves inside a model shows in transformers, too.
    """
    if isinstance(error, SAID) or is_out_of_memory(error):
        return None
    packages = {LIBRARY, REMOTE, __package__.partition(".")[0]}
    passed = [
        (frame.f_globals.get("__name__", "").partition(".")[0], Path(frame.f_code.co_filename).name, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    passed = [place for place in passed if place[0] in packages]
    if not passed or passed[-1][0] not in (LIBRARY, REMOTE):
        return None
    package, file, line = passed[-1]
    entered = next(number for number, place in enumerate(passed) if place[0] in (LIBRARY, REMOTE))
    if package == LIBRARY and any(place[0] not in (LIBRARY, REMOTE) for place in passed[entered:]):
        return None
    return f"{'code that it brings along' if package == REMOTE else LIBRARY}, {file} line {line}"


# --- tokenizers -------------------------------------------------------------------------------------------------------


class CheckedTokenizer:
    """A wrapped tokenizer: whatever it raises or returns wrongly becomes a `CheckpointError` that names it.

    Token ids are checked to be among those that the model has embeddings for. All else is the tokenizer's own.

    Args:
        tokenizer: of transformers, or what a checkpoint has in its place.
        name: of the model.
        rows: of the model's embedding; None: not known.
    """

    def __init__(self, tokenizer: Any, name: str, rows: int | None) -> None:
        # Past `__setattr__`, which hands everything on to the tokenizer.
        vars(self).update(bare=tokenizer, _name=name, _rows=rows)

    def __call__(self, text: str | Sequence[str], *pair: Any, **options: Any) -> Any:
        encoded = self._called(self.bare, text, *pair, **options)
        try:
            ids = encoded["input_ids"]
        except (KeyError, TypeError) as error:
            raise self._fault(f"gives {type(encoded).__name__} without input_ids for a text") from error
        if "return_tensors" not in options:
            for row_text, row in [(text, ids)] if isinstance(text, str) else zip(text, ids, strict=True):
                self._check(row_text, row)
        return encoded

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The tokenizer's own, so that libraries take it for one of theirs."""
        return type(self.bare)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["bare"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.bare, name, value)

    def __len__(self) -> int:
        return len(self.bare)

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckedTokenizer, (self.bare, self._name, self._rows)

    def decode(self, ids: Any, *how: Any, **options: Any) -> str:
        """Return the text of token ids."""
        text = self._called(self.bare.decode, ids, *how, **options)
        if not isinstance(text, str):
            raise self._fault(f"decodes token ids to {type(text).__name__}, not to text")
        return text

    def apply_chat_template(self, messages: Sequence[Any], *how: Any, **options: Any) -> Any:
        """Return messages in the chat template."""
        try:
            made = self.bare.apply_chat_template(messages, *how, **options)
        except (Exception, SystemExit) as error:
            if isinstance(error, SAID) or is_out_of_memory(error):
                raise
            raise CheckpointError(
                f"the chat template of model {self._name!r} fails ({format_error(error)}): repair it in the model's "
                "folder (chat_template.jinja, or chat_template in tokenizer_config.json), or remove it there to have "
                "prompts without one"
            ) from error
        if options.get("tokenize") is False and not isinstance(made, str):
            raise CheckpointError(
                f"the chat template of model {self._name!r} gives {type(made).__name__}, not text: repair or remove it"
            )
        return made

    def _called(self, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
        try:
            return function(*given, **options)
        except NotImplementedError as error:  # what callers of slow tokenizers know how to do without
            if options.get("return_offsets_mapping"):
                raise
            raise self._fault(f"fails ({format_error(error)})") from error
        except (Exception, SystemExit) as error:
            if isinstance(error, SAID) or is_out_of_memory(error):
                raise
            raise self._fault(f"fails ({format_error(error)})") from error

    def _check(self, text: str, row: Any) -> None:
        """Refuse token ids that are none, or for which the model has no embedding."""
        if not isinstance(row, list | tuple) or not set(map(type, row)) <= {int} or min(row, default=0) < 0:
            raise self._fault("gives no list of token ids for a text")
        if self._rows is None or max(row, default=0) < self._rows:
            return
        beyond = sorted({token for token in row if token >= self._rows})
        named = ", ".join(f"{format_value(self.decode([token]))} (id {token})" for token in beyond[:_MOST_NAMED])
        more = f" and {len(beyond) - _MOST_NAMED} more" if len(beyond) > _MOST_NAMED else ""
        raise CheckpointError(
            f"the text {format_value(text)} has tokens that model {self._name!r} has no embedding for: "
            f"{named}{more}, where "
            f"its last id is {self._rows - 1}: leave them out of the text, or resize the model for its tokenizer "
            "(resize_token_embeddings)"
        )

    def _fault(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"the tokenizer of model {self._name!r}, {type(self.bare).__name__}, {problem}: check its files, and "
            f"whether it is made for transformers {read_version(LIBRARY)}"
        )


@contextmanager
def name_text_on_error(where: str) -> Iterator[None]:
    """Add to a tokenizer's error which text it could not encode."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error


# --- models -----------------------------------------------------------------------------------------------------------


def require_contract(model: Any, name: str, weights: bool = True) -> None:
    """Refuse a model that cannot be called as models of transformers are, before work is begun that would be lost.

    One whose class is none of transformers reads a token if it has `weights`: nothing else tells what it gives back.

    Raises:
        CheckpointError: see there.
        IncompatibleError: see `describe`.
    """
    from kvsearch.models.architecture import describe

    try:
        describe(model)
        _require_arguments(model, name)
        _require_ends(model, name)
        if weights and not _is_of_library(model):
            _read_one_token(model, name)
    except (Exception, SystemExit) as error:
        if _is_of_library(model) or isinstance(error, SAID) or is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"model {name!r} cannot be run: its class {type(model).__name__} fails ({format_error(error)}); check "
            f"whether it is made for transformers {read_version(LIBRARY)}"
        ) from error


def _require_arguments(model: Any, name: str) -> None:
    from transformers.generation.utils import ALL_CACHE_NAMES

    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    if missing := [given for given in (*_CALLED_WITH, ALL_CACHE_NAMES[0]) if given not in parameters]:
        raise CheckpointError(
            f"model {name!r} cannot be run: forward() of {type(model).__name__} does not take {', '.join(missing)}"
        )


def _require_ends(model: Any, name: str) -> None:
    """Refuse ends of a text that are no token ids."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    for end in ends if isinstance(ends, list) else [ends]:
        if end is not None and (type(end) is not int or end < 0):
            raise CheckpointError(
                f"model {name!r}: eos_token_id of its generation_config.json or config.json must be a token id, or a "
                f"list of them, not {format_value(end)}"
            )


def _read_one_token(model: Any, name: str) -> None:
    """Refuse a model that gives no logits for a token, or leaves no trace of it in the cache."""
    import torch
    from transformers import DynamicCache
    from transformers.generation.utils import ALL_CACHE_NAMES

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        read = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=ids, logits_to_keep=1,
            **{ALL_CACHE_NAMES[0]: cache},
        )  # fmt: skip
    logits = getattr(read, "logits", None)
    cannot = f"model {name!r} cannot be run: forward() of {type(model).__name__}"
    if not isinstance(logits, torch.Tensor) or logits.shape[:2] != ids.shape:
        raise CheckpointError(f"{cannot} gives no logits for a token")
    if cache.get_seq_length() != 1:
        raise CheckpointError(f"{cannot} puts nothing into the cache that it is given as {ALL_CACHE_NAMES[0]}=")


def _is_of_library(model: Any) -> bool:
    return type(model).__module__.partition(".")[0] == LIBRARY


def count_embeddings(model: Any) -> int | None:
    """Count the token ids that a model has embeddings for; None if unknown."""
    try:
        rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    except (NotImplementedError, AttributeError):  # models whose own code does not say where they are
        rows = None
    if rows is None:
        rows = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    return rows if isinstance(rows, int) else None
