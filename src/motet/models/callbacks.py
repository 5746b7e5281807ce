"""Functions of the user's own around an encoder and at the merge of rows, named in a recipe or given in code.

    before(values, sizes)             -> (values, sizes)   what the encoder is given in place of the items
    between(rows, sizes)              -> rows              encoder rows, before the projector
    after(rows, sizes)                -> rows              projected rows, before they go to the backbone
    merge(embeds, features, sequences) -> embeds           rows into the backbone's embeddings (`models/merge.py`)

(Cornstarch section 5.1.) Sequences are laid out from sizes before anything is computed, so a callback that changes
numbers of rows says so by functions of sizes, int64 [num_items, size_dim], on itself:

    before.items(sizes)       (sizes of the items that it returns, how many each item becomes: int64 [num_items])
    before.num_values(sizes)  rows of values that it is given of each item, if not the product of the item's sizes
    between.num_rows(sizes)   rows of each item, int64 [num_items], or rows and columns of a raster, [num_items, 2]
    after.num_rows(sizes)     rows of each item, int64 [num_items]
    between.output_dim        the width of its rows, if it is not that of the encoder's

`between` gets the sizes of the items that `before` returned, `after` those of the items themselves. No callback is
called without items; a merge is not called on a rank whose sequences have no rows, unless its `takes_text` is true.
A callback with weights is an `nn.Module`. A recipe names its class, which is built without arguments, from a seed, so
that all ranks have the same weights.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.own_file import NAMED_IN_FILE, import_file
from motet.core.words import counted_words
from motet.models.contract import item_rows
from motet.models.initialise import seeded

ARGUMENTS = {
    "before": ("values", "sizes"),
    "between": ("rows", "sizes"),
    "after": ("rows", "sizes"),
    "merge": ("embeds", "features", "sequences"),
}
"""The arguments with which each callback is called, by position."""


def imported(where: str, path: str, form: str) -> Any:
    """What "package.module:name" or "file.py:name" names.

    where: the key of the recipe. form: what it is to be written as.

    Raises UserError if it cannot be imported.
    """
    package, _, attribute = path.partition(":")
    try:
        in_file = NAMED_IN_FILE.fullmatch(path)
        found = import_file(where, package) if in_file else importlib.import_module(package)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise UserError(f"{where}: cannot be imported as {form} ({error})") from error
    return found


def named_callback(where: str, kind: str, path: str, seed: int) -> Callable[..., Any]:
    """The callback that a recipe names. where: the key of the recipe; kind: its key in ARGUMENTS.

    Raises UserError for one that is not found, is not callable or takes other arguments.
    """
    sentence = f"{where} = {path!r}"
    found = imported(sentence, path, "package.module:function")
    if isinstance(found, type):
        _check_class(sentence, kind, found)
        with seeded(seed, where):
            found = found()
    elif isinstance(found, nn.Module) and next(found.parameters(), None) is not None:
        raise UserError(
            f"{sentence}: holds weights that were drawn when it was imported, which differ from rank to rank; name its "
            "class, which is built from the recipe's seed"
        )
    check_callback(sentence, kind, found)
    return found  # type: ignore[no-any-return]


def check_callback(where: str, kind: str, callback: Any) -> None:
    """Raise UserError for a callback that cannot be called with the arguments of its kind, or says a thing wrongly."""
    if not callable(callback):
        raise UserError(f"{where}: is {type(callback).__name__}, which cannot be called")
    _check_arguments(where, kind, callback.forward if isinstance(callback, nn.Module) else callback)
    for member, kinds in (("items", ("before",)), ("num_rows", ("between", "after"))):
        if (said := getattr(callback, member, None)) is not None and kind in kinds and not callable(said):
            raise UserError(f"{where}: its {member} is {type(said).__name__}; it must be a function of sizes")
    width = getattr(callback, "output_dim", None)
    if kind == "between" and width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 1):
        raise UserError(f"{where}: its output_dim is {width!r}; it must be a whole number of at least 1")


def callback_name(callback: Any) -> str:
    """The name of a callback, for messages: "package.module:function"."""
    named = callback if hasattr(callback, "__qualname__") else type(callback)
    return f"{named.__module__}:{named.__qualname__}"


def _check_class(where: str, kind: str, found: type) -> None:
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: is a class that cannot be built without arguments ({error})") from error
    call = found.forward if issubclass(found, nn.Module) else getattr(found, "__call__", None)  # noqa: B004
    if call is None or "__call__" not in dir(found):
        raise UserError(f"{where}: is a class whose instances cannot be called")
    _check_arguments(where, kind, call, found)


def _check_arguments(where: str, kind: str, call: Callable[..., Any], *first: Any) -> None:
    arguments = ARGUMENTS[kind]
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return  # Compiled code says nothing of its arguments.
    try:
        signature.bind(*first, *arguments)
    except TypeError:
        taken = ", ".join([*signature.parameters][len(first) :])
        raise UserError(
            f"{where}: is called with {len(arguments)} arguments, {', '.join(arguments)}, and takes ({taken})"
        ) from None


def checked_counts(
    kind: str, callback: Any, member: str, said: Any, num_items: int, dimensions: tuple[int, ...]
) -> Int64Array:
    """What a callback says of its items. Raises UserError if it is no int64 [num_items], or of `dimensions`."""
    said = np.asarray(said)
    if said.ndim not in dimensions or len(said) != num_items or said.dtype.kind not in "iu" or (said < 0).any():
        raise UserError(
            f"{kind} ({callback_name(callback)}): its {member} gives {said.tolist()} for "
            f"{counted_words(num_items, 'item')}; it must give a whole number of each"
        )
    return said.astype(np.int64)


def check_num_rows(who: str, rows: Tensor, extents: Int64Array, num_items: int, said_by: str) -> None:
    """Raise UserError for other rows than the sequences were laid out for.

    who: gave them. extents: of each item, as of `contract.item_rows`. said_by: what should have said how many come.
    """
    expected = int(item_rows(extents).sum())
    if not isinstance(rows, Tensor) or rows.ndim != 2 or len(rows) != expected:
        gave = counted_words(len(rows), "row") if isinstance(rows, Tensor) and rows.ndim == 2 else "no rows [n, width]"
        raise UserError(
            f"{who} gave {gave} for {counted_words(num_items, 'item')}, and {expected} were expected, for which the "
            f"sequences were laid out; {said_by} must say what it returns"
        )


def callback_dtype(callback: Any, otherwise: torch.dtype) -> torch.dtype:
    """The dtype of a callback's weights, or of another module's; `otherwise` if it has none."""
    parameters = callback.parameters() if isinstance(callback, nn.Module) else ()
    return next((p.dtype for p in parameters if p.is_floating_point()), otherwise)
