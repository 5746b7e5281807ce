"""The largest accepted sizes of models, jobs and clusters.

Each limit is above all real sizes, and low enough that a mistyped number does not fill the memory.
"""

from motet.core.errors import UserError

INT64_MAX = 2**63 - 1
MAX_LAYERS = 1024
MAX_WIDTH = 2**17
MAX_MLP = 2**20
MAX_HEADS = 2**12
MAX_VOCABULARY = 2**24
MAX_JOINED = 1024
"""The most rows that a projector joins to one."""
MAX_QUERIES = 4096
"""The most learned query tokens of an item that is generated."""
MAX_TURN = 2**16
"""The most rows of a turn that is the condition of an item that is generated."""

MAX_EXAMPLES = 10**6
"""The most examples of a step over all ranks; a step is decided in memory."""
MAX_STEPS = 10**9
"""The most steps of a run; MAX_STEPS * MAX_EXAMPLES fits into 64 bits."""
MAX_SEED = INT64_MAX
MAX_WAIT_S = 10**6
"""Seconds that a rank waits for another: eleven days."""
MAX_BATCHES = 10_000
"""The most batches that an analysis or a prediction draws."""
MAX_NODES = 100_000
MAX_PIECES = 64
MAX_RANKS_PER_NODE = 1024
MAX_RANKS = 2**20
"""The most ranks of a job."""
MAX_EXAMPLES_TIMES_RANKS = 10**10
"""The most examples times ranks of a step that is planned or simulated; these take half a minute."""


def check_size(num_examples: int, num_ranks: int) -> None:
    """Raise UserError for a step with more than MAX_EXAMPLES_TIMES_RANKS examples times ranks."""
    if num_examples * num_ranks > MAX_EXAMPLES_TIMES_RANKS:
        raise UserError(
            f"A batch of {num_examples:,} examples on {num_ranks:,} ranks is too large to simulate: examples times "
            f"ranks may be {MAX_EXAMPLES_TIMES_RANKS:,}."
        )
