"""How much a function does, where its seconds would be the machine's matter: `from work import num_calls`."""

import sys
from collections.abc import Callable


def num_calls(function: Callable[[], object]) -> int:
    """The calls of functions, in Python or in C, that `function` makes in this thread: the same on every machine."""
    count = 0

    def see(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
