"""The result of a placement algorithm, in the reference and in the native core."""

from __future__ import annotations

from motet.core.arrays import Int32Array, Int64Array
from motet.core.assignment import csr_from_ranks

AssignmentFields = tuple[Int32Array, Int64Array, Int64Array, Int64Array, int | Int64Array]
"""ranks, items, offsets, loads, bound: the fields of core.Assignment."""


def placement(ranks: Int32Array, loads: Int64Array, bound: int | Int64Array) -> AssignmentFields:
    """The result with these ranks; the items of a rank are in item order."""
    return ranks, *csr_from_ranks(ranks, len(loads)), loads, bound
