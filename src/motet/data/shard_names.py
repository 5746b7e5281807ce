"""What names of shards stand for: braces, and the endings of tar files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from motet.core.errors import UserError

TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_MAX_SHARDS = 100_000
"""The most shards that braces may name: 100 TB at a gigabyte each. More is a slip, and would fill the memory."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_NESTED = re.compile(r"\{[^}]*\{")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")


def expand_braces(pattern: str) -> Iterator[str]:
    """Every name that a pattern stands for. Raises UserError if there are too many, before it makes any."""
    if _NESTED.search(pattern):
        raise UserError(f"manifest {pattern}: has braces within braces; name one list or range in each")
    count = math.prod(_num_choices(match.group(1)) for match in _BRACES.finditer(pattern))
    if count > _MAX_SHARDS:
        raise UserError(f"manifest {pattern}: its braces name {count:,} shards, more than {_MAX_SHARDS:,}")
    yield from _expand(pattern)


def _num_choices(choices: str) -> int:
    if bounds := _RANGE.fullmatch(choices):
        return max(int(bounds[2]) - int(bounds[1]) + 1, 0)
    return choices.count(",") + 1


def _expand(pattern: str) -> Iterator[str]:
    match = _BRACES.search(pattern)
    if not match:
        yield pattern
        return
    if bounds := _RANGE.fullmatch(match.group(1)):
        first, last = bounds.groups()
        choices = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    else:
        choices = match.group(1).split(",")
    for choice in choices:
        for rest in _expand(pattern[match.end() :]):
            yield pattern[: match.start()] + choice + rest
