"""Dropout whose masks depend on the run, the step, the item, the place in the model and the row, and on nothing else.

So a step under any Plan, balanced in any way, draws what one process draws. torch's generators give numbers in the
order in which they are asked for, which is another one on each rank.

    bits of an element = mix(key of its row + column * GAMMA)          SplitMix64 (Steele et al. 2014), one stream a row
    key of a row       = mix(mix(key of its item + key of the draw) + number of the row in the item * GAMMA)

A draw is named by its module, by its place there (between which blocks, or in which one), and by its number at that
place: the same for whatever part of a module a stage runs, and when a block is recomputed.

It is a mode of torch functions, so that the modules of transformers and of users need no change. It is entered where a
batch has keys (`RankBatch.draws`), which training gives it if any module drops out. What drops out in a way that no
item says is refused. Other random numbers (noise of a user's own module) come from torch's generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from threading import local
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.on_device import on_device

_SECOND_HALF = 2**15
"""The number of the first draw of a block's second half, so that it draws the same where the halves run apart."""
MERGE, ENTER, BEFORE, BETWEEN, PROJECTOR, AFTER = range(-6, 0)
"""Places outside of blocks. Block n is place 2 n + 1, and behind it is place 2 n + 2."""
_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NO_STEP = 2**62
_AT_ONCE = 2**20
"""Elements of a mask that are drawn at a time: their bits take 8 bytes each."""
_DROPOUTS = (functional.dropout, torch.dropout)
_RATES_OF_OTHERS: dict[Callable[..., Any], tuple[str, int]] = {
    **dict.fromkeys(
        (
            functional.dropout1d,
            functional.dropout2d,
            functional.dropout3d,
            functional.alpha_dropout,
            functional.feature_alpha_dropout,
        ),
        ("p", 1),
    ),
    functional.scaled_dot_product_attention: ("dropout_p", 4),
    functional.multi_head_attention_forward: ("dropout_p", 10),
}
"""Functions that drop out in another way -> name and place of the argument that is their rate."""


def drops_out(model: nn.Module) -> bool:
    """Whether any module drops out: torch's own, and those with a number above 0 that is called `...dropout...`."""
    return any(
        isinstance(rate, float)
        and rate > 0
        and ("dropout" in key or (key == "p" and "Dropout" in type(module).__name__))
        for module in model.modules()
        for key, rate in vars(module).items()
    )


def example_keys(seed: int, step: int, examples: Int64Array) -> Int64Array:
    """The keys of examples in a step. examples: their numbers in the dataset, int64 [n]."""
    run = np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)
    return stream(run, examples).view(np.int64)


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of torch's generators in a step, by which all is drawn that has no key: noise of modules of one's own.

    rank: the first of those that share its products, which draw alike, as all of them compute what is around these, and
          of those that compute copies of one encoder.
    """
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0]) >> 1


def heldout_keys(seed: int, examples: Int64Array) -> Int64Array:
    """The keys by which noise of held-out examples is drawn: of no step of training. examples: int64 [n]."""
    return example_keys(seed, _NO_STEP, examples)


def item_keys(keys: Int64Array, example: Int64Array, items: Int64Array) -> Int64Array:
    """The keys of items of a phase. keys: of examples. example: of all items, ascending. items: which, int64 [n]."""
    numbers = items - np.searchsorted(example, example[items])
    return stream(keys[example[items]].view(np.uint64), numbers).view(np.int64)


class ItemRows(NamedTuple):
    """Rows of items of which other ranks have the rest: each row's item, and its number there; int64 [num_rows]."""

    item: Int64Array
    row: Int64Array


@dataclass
class _Draws:
    """What a module draws for. keys: of its items. counts: rows of each item, as any tensor may have them.

    number: of the next draw at this place.
    divided: the first of the heads, and of the columns, that this rank has where tensor-parallel ranks divide them.
    """

    module: str
    keys: Int64Array
    counts: tuple[Int64Array | ItemRows, ...] = ()
    place: int = ENTER
    number: int = 0
    divided: tuple[int, int] = (0, 0)


class _Active(local):
    draws: _Draws | None = None


_active = _Active()


@contextmanager
def drawing(module: str, draws: Mapping[str, Int64Array] | None) -> Iterator[None]:
    """In the block, a module runs on its items. draws: of `RankBatch`; None: torch's generators draw."""
    if draws is None:
        yield
        return
    # A rank without items may run a spare one, which needs some key.
    with _in(_Draws(module, draws[module] if len(draws[module]) else np.zeros(1, dtype=np.int64))), _Mode():
        yield


def arranged(place: int, counts: Callable[[], Iterable[Int64Array | ItemRows]]) -> AbstractContextManager[None]:
    """In the block, tensors have the rows of the items one after the other.

    counts: gives the rows of each item, int64 [num_items], in each way in which tensors inside may have them, or some
            rows of items; it is called if there is anything to draw for.
    """
    return nullcontext() if _active.draws is None else _arranged(_active.draws, place, counts)


@contextmanager
def _arranged(draws: _Draws, place: int, counts: Callable[[], Iterable[Int64Array | ItemRows]]) -> Iterator[None]:
    before = draws.counts
    draws.counts, draws.place, draws.number = tuple(counts()), place, 0
    try:
        yield
    finally:
        draws.counts = before


@contextmanager
def some_rows(rows: ItemRows) -> Iterator[None]:
    """In the block, tensors have these rows of the items, and no others. The place and its draws go on."""
    draws = _active.draws
    before = () if draws is None else draws.counts
    if draws is not None:
        draws.counts = (rows,)
    try:
        yield
    finally:
        if draws is not None:
            draws.counts = before


@contextmanager
def rows_into(module: nn.Module, rows: Callable[[], ItemRows]) -> Iterator[None]:
    """In the block, what this module is given has these rows, whatever tensors around it have.

    rows: is called if there is anything to draw for.
    """
    if _active.draws is None:
        yield
        return
    there, inside = rows(), ExitStack()
    hooks = (
        module.register_forward_pre_hook(lambda *_: inside.enter_context(some_rows(there)) and None),
        module.register_forward_hook(lambda *_: inside.close(), always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def some_more_rows(num_rows: int, numbers: Callable[[], Int64Array]) -> Iterator[None]:
    """In the block, tensors have so many rows, as the module has them around it, or some of these; or others that it
    has around it, as attention has whose heads are dealt out.

    numbers: gives the numbers of these among all, int64 [n]; it is called if there is anything to draw for.
    """
    draws = _active.draws
    before = () if draws is None else draws.counts
    if draws is not None:
        item, row = _rows_of_items(draws, (num_rows,))
        some = numbers()
        draws.counts = ItemRows(item, row), ItemRows(item[some], row[some]), *before
    try:
        yield
    finally:
        if draws is not None:
            draws.counts = before


def draws_by_item() -> bool:
    """Whether masks are drawn by item here, and not by torch's generators."""
    return _active.draws is not None


def in_block(number: int, run: Callable[..., Any], half: int = 0) -> Callable[..., Any]:
    """A function that runs block `number`, or its second half (half 1).

    It draws the same if backward calls it again, outside of all contexts.
    """
    draws = _active.draws
    if draws is None:
        return run

    def running(*args: Any, **kwargs: Any) -> Any:
        own = _Draws(draws.module, draws.keys, counts, 2 * number + 1, half * _SECOND_HALF)
        with nullcontext() if _active.draws is draws else _Mode(), _in(own):
            ran = run(*args, **kwargs)
        draws.place, draws.number = own.place + 1, 0
        return ran

    counts = draws.counts
    return running


@contextmanager
def heads_from(first: int, *, is_last: bool = True) -> Iterator[None]:
    """In the block, attention has the heads from `first` on, of those that this rank has.

    is_last: False: the next heads of the same rows are to come, in the same draw.
    """
    draws = _active.draws
    before = ((0, 0), 0) if draws is None else (draws.divided, draws.number)
    if draws is not None:
        draws.divided = before[0][0] + first, before[0][1]
    try:
        yield
    finally:
        if draws is not None:
            draws.divided = before[0]
            if not is_last:
                draws.number = before[1]


@contextmanager
def whole_columns(is_whole: bool) -> Iterator[None]:
    """In the block, if is_whole, tensors have all columns, on tensor-parallel ranks too."""
    draws = _active.draws
    before = (0, 0) if draws is None else draws.divided
    if draws is not None and is_whole:
        draws.divided = 0, 0
    try:
        yield
    finally:
        if draws is not None:
            draws.divided = before


@contextmanager
def _in(draws: _Draws) -> Iterator[None]:
    before, _active.draws = _active.draws, draws
    try:
        yield
    finally:
        _active.draws = before


def set_divided(first_head: int = 0, first_column: int = 0) -> None:
    """From here on, tensors have heads, or columns, from these on (`tensor_parallel.py`); 0 where they have all."""
    if _active.draws is not None:
        _active.draws.divided = first_head, first_column


class _Mode(TorchFunctionMode):
    """Draws by the keys of items where torch would draw by itself."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return _dropout(*args, **kwargs)
        if func in _RATES_OF_OTHERS and _is_drawn(func, args, kwargs):
            assert _active.draws is not None, "the mode is entered with draws"
            raise UserError(
                f"{_active.draws.module} calls {func.__name__} with dropout, whose masks Motet cannot draw by item, so "
                "that they would depend on the ranks; set that rate to 0, or use dropout"
            )
        return func(*args, **kwargs)


def _is_drawn(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    name, place = _RATES_OF_OTHERS[func]
    rate = kwargs.get(name, args[place] if len(args) > place else 0.0)
    return bool(rate and kwargs.get("training", True))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **train: bool) -> Tensor:
    """As `torch.nn.functional.dropout`; `torch.dropout` calls the third argument `train`."""
    if not train.get("train", training) or p == 0 or input.numel() == 0:
        return input
    rows, draws = next_rows(input.shape[:-1], input.device), _active.draws
    assert rows is not None, "the mode is entered with draws"
    first = 0 if draws is None else draws.divided[1]
    return dropped_out(input, rows.view(-1), p, torch.arange(first, first + input.shape[-1], device=input.device))


def next_rows(shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor | None:
    """The keys of the rows of the next draw, int64 of this shape; None where torch's generators draw.

    shape: (items, rows of the longest), or any whose product is the number of rows of all items.
    """
    draws = _active.draws
    if draws is None:
        return None
    item, row = _rows_of_items(draws, tuple(shape))
    draw = stream(np.array([crc32(draws.module.encode())], np.uint64), np.array([draws.place * 2**16 + draws.number]))
    draws.number += 1
    keys = stream(stream(draws.keys.view(np.uint64) ^ draw, np.zeros(1, np.int64))[item], row)
    return on_device(keys.view(np.int64), device).view(tuple(shape))


def _rows_of_items(draws: _Draws, shape: tuple[int, ...]) -> tuple[Int64Array, Int64Array]:
    """Item and number in the item of each row. Raises UserError if no arrangement of the module has such rows."""
    num_items, num_rows = len(draws.keys), int(np.prod(shape))
    for some in draws.counts:
        if isinstance(some, ItemRows) and len(some.row) == num_rows:
            return some
    if len(shape) > 1 and shape[0] == num_items:
        counts = np.full(num_items, num_rows // max(num_items, 1))
    else:
        known_counts = [counts for counts in draws.counts if not isinstance(counts, ItemRows)]
        fitting = [counts for counts in known_counts if counts.sum() == num_rows]
        if not fitting or any((counts != fitting[0]).any() for counts in fitting):
            known = " or ".join(str(int(counts.sum())) for counts in known_counts) or "unknown numbers of"
            raise UserError(
                f"{draws.module} drops out of a tensor of {list(shape)} rows where its {num_items} items have {known} "
                "rows, so that Motet cannot tell which row is whose and draw by item; set that rate to 0"
            )
        counts = fitting[0]
    item = np.repeat(np.arange(num_items), counts)
    return item, np.arange(num_rows) - np.repeat(np.cumsum(counts) - counts, counts)


def dropped_out(values: Tensor, rows: Tensor, rate: float, numbers: Tensor | None = None) -> Tensor:
    """Values with elements set to 0, with probability `rate`, and the others scaled by 1 / (1 - rate).

    values: [..., columns]. rows: the key of each row, int64 [product of the leading dimensions].
    numbers: of the columns, int64 [columns]; by default from 0.
    """
    if rate >= 1:
        return values * 0
    num_columns = values.shape[-1]
    drops = torch.empty(len(rows), num_columns, dtype=torch.bool, device=values.device)
    numbers = torch.arange(num_columns, device=values.device) if numbers is None else numbers
    columns = numbers * _signed(_GAMMA)
    size = max(1, _AT_ONCE // max(num_columns, 1))
    limit = int(rate * 2**64) - 2**63
    for part, keys in zip(drops.split(size), rows.split(size)):
        torch.lt(mixed_bits(keys[:, None] + columns), limit, out=part)
    return values.masked_fill(drops.view(values.shape), 0) * (1 / (1 - rate))


def of_heads(rows: Tensor, num_heads: int) -> Tensor:
    """Row keys [count, length] -> those of the same rows in each head that is here, [count, num_heads, length]."""
    first = 1 if _active.draws is None else 1 + _active.draws.divided[0]
    heads = torch.arange(first, first + num_heads, device=rows.device) * _signed(_GAMMA)
    return mixed_bits(rows[:, None] ^ mixed_bits(heads)[:, None])


def counted_from(rows: Tensor, first: Tensor) -> Tensor:
    """Row keys for which columns have numbers from `first` on, which is a number for each row; both int64."""
    return rows - first * _signed(_GAMMA)


def mixed_bits(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64, whose right shift copies the sign."""
    bits = (bits ^ (bits >> 30 & 2**34 - 1)) * _signed(_FIRST)
    bits = (bits ^ (bits >> 27 & 2**37 - 1)) * _signed(_SECOND)
    return bits ^ (bits >> 31 & 2**33 - 1)


def stream(keys: NDArray[np.uint64], numbers: Int64Array) -> NDArray[np.uint64]:
    """Numbers of the streams of keys: SplitMix64 on the host."""
    bits = keys + (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_FIRST)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_SECOND)
    return bits ^ (bits >> np.uint64(31))


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits
