"""Times attention of items that ranks share: runs of rows beside the keys that they see, and the same items whole.

Ranks share items in runs of rows (`models/context_items.py`). A run takes a call of a kernel or two, or a mask, and
long runs take kernels that whole items do not. What layers take of whole items says nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from motet.core.arrays import Float64Array, Int64Array
from motet.core.attention_table import AttentionTable
from motet.cost.profile import Batch, RunPoints, RunTimes
from motet.models.attention import Extents, PackedItems
from motet.models.table_items import TableItems
from motet.profiling.stopwatch import Stopwatch, kept_calls, time_forward
from motet.profiling.subjects import Subject

_LONG = 2
"""A run is at most 1 / so much of the longest item, whose ranks have one each."""
_RATIO = 4
"""Of lengths, and of rows of runs, one is so many times the next; what is held out stands between."""
_NUM_LENGTHS, _NUM_SIZES = 3, 4
_SHORTEST, _SHORTEST_RUN = 64, 16
"""Shorter items take too little to be told, and shorter runs are rare: blocks of 128 rows are dealt out."""
_PACK_ROWS = 512
"""Items that are shorter stand in packs of about so many rows."""


class RunPack(NamedTuple):
    """Items whose rows two ranks share, in runs of `size` rows by turns."""

    lengths: tuple[int, ...]
    size: int

    @property
    def batch(self) -> Batch:
        """The items as a batch."""
        return tuple((1, length) for length in self.lengths)

    def rows_of(self, rank: int) -> Int64Array:
        """The rows of one of both ranks, ascending. The last run of an item may be shorter."""
        positions = np.concatenate([np.arange(length) for length in self.lengths])
        return np.flatnonzero(positions // self.size % 2 == rank)

    @property
    def num_runs(self) -> int:
        """On both ranks."""
        return sum(-(-length // self.size) for length in self.lengths)


def run_packs(lengths: Int64Array, max_rows: int) -> tuple[list[RunPack], list[RunPack]]:
    """Packs to interpolate between, and packs that are held out, of other lengths and sizes; none of short items alone.

    lengths: int64 [n], ascending, that items can have. max_rows: the most rows of a pack.
    """
    usable = lengths[(lengths <= max_rows) & (lengths >= _SHORTEST)]
    if not len(usable):
        return [], []
    longest = int(usable[-1])
    chosen = [longest // _RATIO**step for step in range(_NUM_LENGTHS) if longest // _RATIO**step >= usable[0]]
    between = [int(np.sqrt(one * other)) for one, other in pairwise(chosen)]
    grid, held_out = (list(_packs(usable, aimed, shift)) for aimed, shift in ((chosen, 1), (between or chosen, _RATIO)))
    grid = list(dict.fromkeys(grid))
    return grid, [pack for pack in dict.fromkeys(held_out) if pack not in grid]


def _packs(usable: Int64Array, aimed: Sequence[int], shift: int) -> Iterator[RunPack]:
    """Packs about each length, with runs of several sizes. shift: by whose root sizes are less than those of a grid."""
    for length in aimed:
        last = int(np.searchsorted(usable, length, side="right"))
        count = max(min(_PACK_ROWS // length, last), 1)
        lengths = tuple(usable[max(last - count, 0) : last].tolist())
        longest = lengths[-1]
        for step in range(_NUM_SIZES):
            size = round(longest / (_LONG * _RATIO**step * shift**0.5))
            if size >= _SHORTEST_RUN:
                yield RunPack(lengths, size)


@dataclass(frozen=True, eq=False)
class _Attended:
    """A call of a layer's attention, as of `TableItems.attend`. rows: query, key and value. scores: by name."""

    extents: Extents
    rows: tuple[Tensor, Tensor, Tensor]
    scale: float | None
    dropout: float
    window: int | None
    scores: dict[str, Any]


class _Recorded:
    """Extents that note with what they are called."""

    def __init__(self, extents: Any, calls: list[_Attended]) -> None:
        self._extents, self._calls, self.causal = extents, calls, extents.causal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extents, name)

    def with_scores(self) -> _Recorded:
        """What computes soft caps and sinks, recorded too."""
        return _Recorded(self._extents.with_scores(), self._calls)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        dropout: float,
        window: int | None,
        **scores: Any,
    ) -> Tensor:
        """As of `TableItems`."""
        rows = query.detach(), key.detach(), value.detach()
        self._calls.append(_Attended(self._extents, rows, scale, dropout, window, scores))
        attended: Tensor = self._extents.attend(query, key, value, scale, dropout, window, **scores)
        return attended


class MeasuredRuns:
    """Attention of the runs of each layer of a subject. samples: by round, [num_layers, num_packs, 4] seconds."""

    def __init__(self, subject: Subject, max_rows: int) -> None:
        self.subject = subject
        self.grid, self.held_out = run_packs(subject.lengths, max_rows)
        self.pairs = np.zeros((len(subject.layers), len(self.grid) + len(self.held_out)))
        self.samples: list[Float64Array] = []

    def measure(self, watch: Stopwatch) -> None:
        """Measure all packs once."""
        packs = [*self.grid, *self.held_out]
        found = np.zeros((len(self.subject.layers), len(packs), 4))
        for number, pack in enumerate(packs):
            for layer, calls in self._calls(pack).items():
                for call in calls:
                    if (table := _table(call, pack)) is None:
                        continue
                    self.pairs[layer, number] = float(table.pairs.sum())
                    found[layer, number] += _seconds(call, table, pack, watch)
        self.samples.append(found)

    def _calls(self, pack: RunPack) -> dict[int, list[_Attended]]:
        """What attention of each layer is called with on a pack."""
        attending = {
            number: module
            for number, (layer, modules) in enumerate(self.subject.layers)
            for module in modules
            if layer.attention is not None
        }
        if not attending:
            return {}
        with kept_calls(list(attending.values())) as given, torch.no_grad():
            self.subject.prepare(pack.batch, self.subject.module)()
        found = {}
        for number, module in attending.items():
            found[number] = [call for args, kwargs in given.get(module, ()) for call in _recorded(module, args, kwargs)]
        return found

    def times(self, number: int, gather: Callable[[Float64Array], list[Float64Array]]) -> RunTimes | None:
        """Of a layer, by its place: medians over rounds, then over ranks; None of one without runs."""
        if not self.samples or not self.pairs[number].all() or not self.grid:
            return None
        of_rank = np.median(np.stack([sample[number] for sample in self.samples]), axis=0)
        seconds = np.median(np.stack(gather(of_rank)), axis=0)
        packs = [*self.grid, *self.held_out]
        split = len(self.grid)
        grid, held_out = (
            _points(packs[part], self.pairs[number, part], seconds[part]) for part in (slice(split), slice(split, None))
        )
        return RunTimes(grid=grid, held_out=held_out)


def _points(packs: Sequence[RunPack], pairs: Float64Array, seconds: Float64Array) -> RunPoints:
    num_rows = [sum(pack.lengths) for pack in packs]
    return RunPoints(
        length=tuple(float(max(pack.lengths)) for pack in packs),
        rows=tuple(count / pack.num_runs for count, pack in zip(num_rows, packs, strict=True)),
        pairs=tuple(pairs.tolist()),
        keys=tuple((pairs / np.array(num_rows)).tolist()),
        forward_s=tuple(seconds[:, 0].tolist()),
        input_s=tuple(seconds[:, 1].tolist()),
        whole_forward_s=tuple(seconds[:, 2].tolist()),
        whole_input_s=tuple(seconds[:, 3].tolist()),
    )


def _recorded(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Attended]:
    """What attention is called with in a call of a layer."""
    calls: list[_Attended] = []

    def noted(value: Any) -> Any:
        return _Recorded(value, calls) if hasattr(value, "attend") and hasattr(value, "causal") else value

    with torch.no_grad():
        module(*map(noted, args), **{name: noted(value) for name, value in kwargs.items()})
    return calls


def _table(call: _Attended, pack: RunPack) -> AttentionTable | None:
    """Who sees whom in a call; None where ranks share no rows of its items: of segments, padding and queries."""
    extents = call.extents
    if isinstance(extents, PackedItems):
        if len(extents.lengths) != len(pack.lengths):
            return None
        table = AttentionTable.packed(extents.lengths, extents.causal)
    elif isinstance(extents, TableItems):
        table = extents.table
    else:
        return None
    is_whole = table.num_rows == table.num_keys == call.rows[0].shape[2] == sum(pack.lengths)
    return table.windowed(call.window) if is_whole else None


def _seconds(call: _Attended, table: AttentionTable, pack: RunPack, watch: Stopwatch) -> Float64Array:
    """[4]: forward and backward of both ranks' runs, and of the pack whole."""
    found = np.zeros(4)
    query, key, value = call.rows
    for rank in range(2):
        rows = pack.rows_of(rank)
        if not len(rows):
            continue
        seen = table.of(rows, table.keys).seen
        # The window is in the table, as where ranks share rows.
        own = replace(call, extents=TableItems(table.of(rows, seen), call.extents.causal), window=None)
        # In memory as they are there: rows of queries, and rows of keys and values side by side (`ContextItems`).
        given = query.transpose(1, 2)[:, rows], torch.cat([key[0], value[0]]).transpose(0, 1)[seen]
        found[:2] += _passes(partial(_attend_rows, own), given, watch)
    found[2:] = _passes(partial(_attend, call), call.rows, watch)
    return found


def _attend(call: _Attended, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return call.extents.attend(query, key, value, call.scale, call.dropout, call.window, **call.scores)


def _attend_rows(call: _Attended, query: Tensor, both: Tensor) -> Tensor:
    """query [1, rows, heads, head_dim], keys and values [keys, 2 kv_heads, head_dim]."""
    return _attend(call, query.transpose(1, 2), *both.transpose(0, 1)[None].chunk(2, dim=1))


def _passes(attend: Callable[..., Tensor], rows: Sequence[Tensor], watch: Stopwatch) -> Float64Array:
    """Seconds [2] of forward and backward of attention on these rows."""
    with torch.no_grad():
        attend(*rows)  # What all layers and passes of a pack use is planned at the first call.
    inputs = [each.detach().requires_grad_() for each in rows]
    forward_s, outputs, gradients = time_forward(watch, partial(attend, *inputs))
    work = partial(torch.autograd.grad, outputs, inputs, gradients, allow_unused=True)
    return np.array([forward_s, watch(work, gradients)[0]])
