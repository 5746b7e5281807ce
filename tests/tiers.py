"""Which cases of a long test `make test` runs: the others are marked slow, for `make test-all` (CONTRIBUTING.md)."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

COLLECTED = pytest.StashKey[dict[Path, bool]]()
"""Where a run of pytest keeps, by each file of which it has collected tests, whether one of them is not slow."""


def in_tiers(cases: Mapping[int, Sequence[Any]], first: Mapping[int, Collection[int]]) -> list[Any]:
    """Values of `num_ranks` and `cases` for a test that runs many of them on as many ranks.

    cases: by number of ranks. first: by number of ranks, the numbers of those that `make test` runs, too.
    """
    found = []
    for num_ranks, every in cases.items():
        chosen = set(first.get(num_ranks, ()))
        if not chosen <= set(range(len(every))):
            raise IndexError(f"of {len(every)} cases on {num_ranks} ranks none has a number of {sorted(chosen)}")
        parts = [[case for number, case in enumerate(every) if (number in chosen) == is_first] for is_first in (1, 0)]
        for part, name, marks in zip(parts, ("", ", others"), ((), (pytest.mark.slow,)), strict=True):
            if part:
                found.append(pytest.param(num_ranks, part, id=f"{num_ranks}{name}", marks=marks))
    return found
