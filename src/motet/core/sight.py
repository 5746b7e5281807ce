"""Which rows of packed documents see which in the layers of a backbone: text those before, and some in both directions.

Rows of an image see each other in both directions in Gemma 3, and all rows of a prefix do in PaliGemma. Layers may have
windows. Where ranks share a document, its rows are dealt out by how many keys each of them sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from motet.core.arrays import BoolArray, Int64Array
from motet.core.attention_table import AttentionTable
from motet.core.spec import Layer, ModelSpec
from motet.core.workload import BACKBONE


def _of_prefixes(offsets: Int64Array, targets: BoolArray) -> BoolArray:
    """Which rows stand before the first target of their document, bool [total]; first rows are no targets."""
    is_target = targets.copy()
    starts, lengths = offsets[:-1], np.diff(offsets)
    is_target[starts[lengths > 0]] = False
    before = np.concatenate([[0], np.cumsum(is_target)])
    in_prefix: BoolArray = before[1:] == np.repeat(before[starts], lengths)
    return in_prefix


@dataclass(frozen=True)
class Sight:
    """What the rows of documents see in all layers of a backbone.

    bidirectional: encoders of which rows that follow each other without a token between see each other.
    prefix: whether the rows of a document before its first target do.
    windows: (rows that a row sees at most, or 0: all before it; for how many layers that counts), ascending. One alone
             counts once.

    Example:
        A row sees two rows at most in five of six layers:
        >>> Sight(windows=((0, 1), (2, 5))).pairs(np.array([4])).tolist()
        [6, 12, 13, 14]
        >>> CAUSAL.pairs(np.array([4])) is None
        True
    """

    bidirectional: tuple[str, ...] = ()
    prefix: bool = False
    windows: tuple[tuple[int, int], ...] = ((0, 1),)

    @staticmethod
    def of(layers: Iterable[Layer], bidirectional: Sequence[str] = (), prefix: bool = False) -> Sight:
        """Of the layers of a backbone."""
        attentions = [layer.attention for layer in layers if layer.attention is not None]
        counts = Counter(each.window for each in attentions if not each.keys) or Counter([0])
        common = gcd(*counts.values())
        windows = tuple((window, count // common) for window, count in sorted(counts.items()))
        return Sight(tuple(bidirectional), prefix, windows)

    @staticmethod
    def of_model(model: ModelSpec) -> Sight:
        """Of a model's backbone, as far as lengths say it: which rows see each other in both directions is not known.

        Example:
            >>> from motet.core.shapes import Transformer, language_model, multimodal
            >>> llm = language_model(Transformer(8, 16, 2, window=4, causal=True), 3, 10)
            >>> Sight.of_model(multimodal("short-sighted", llm, [])).windows
            ((4, 1),)
        """
        return Sight.of(model.module(BACKBONE).layers)

    def together(
        self, offsets: Int64Array, targets: BoolArray, places: Mapping[str, NDArray[np.integer]]
    ) -> Int64Array:
        """Runs of rows that see each other in both directions, int64 [n, 2]: from row to row (exclusive), ascending.

        offsets: int64 [num_documents + 1]. targets: bool [total], of all rows.
        places:  encoder -> where its rows stand, int64 [rows].
        Raises ValueError where targets were not read, as rows have no known places then.

        Example:
            >>> Sight(("image",)).together(np.array([0, 4]), np.zeros(4, bool), {"image": np.array([1, 2])}).tolist()
            [[1, 3]]
        """
        if not (self.bidirectional or self.prefix):
            return np.zeros((0, 2), dtype=np.int64)
        if len(targets) != offsets[-1]:
            raise ValueError(
                "this rank did not read the tokens, and so does not know where rows stand that see each other"
            )
        is_inside = _of_prefixes(offsets, targets) if self.prefix else np.zeros(offsets[-1], dtype=np.bool_)
        for name in self.bidirectional:
            if name in places:
                is_inside[places[name]] = True
        inside = np.flatnonzero(is_inside)
        begins = np.diff(inside, prepend=-2) > 1
        begins |= np.isin(inside, offsets[:-1])  # a run ends with its document
        first = np.flatnonzero(begins)
        ends = inside[np.append(first[1:], len(inside)) - 1] + 1 if len(inside) else inside
        return np.stack([inside[first], ends], axis=1)

    def pairs(self, lengths: Int64Array, together: Int64Array | None = None) -> Int64Array | None:
        """How many keys each row of documents sees in all layers, int64 [num_rows], whatever is beside its document.

        lengths: int64 [num_documents]. together: as of `together`; None: no rows see any behind them.
        None where, whatever stands in documents, rows see all those before them.
        """
        if self == CAUSAL:
            return None
        table = AttentionTable.packed(lengths, together=() if together is None else together, prefix=self.prefix)
        of_layers = [count * table.windowed(window or None).pairs for window, count in self.windows]
        pairs: Int64Array = np.sum(of_layers, axis=0)
        return pairs


CAUSAL = Sight()
"""Rows see all rows of their document before them."""
