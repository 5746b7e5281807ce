"""The largest sizes that are taken at all, of models, of jobs and of what they run on.

Each is above any that there is, and below what would fill a machine before a mistyped number is noticed.
"""

from typing import Annotated

from pydantic import Field

from motet.core.errors import UserError

INT64_MAX = 2**63 - 1
MAX_LAYERS = 1024
MAX_WIDTH = 2**17
MAX_MLP = 2**20
MAX_HEADS = 2**12
MAX_VOCABULARY = 2**24
MAX_JOINED = 1024
"""Rows that a projector joins to one."""

MAX_EXAMPLES = 10**6
"""Of a step, over all ranks: a step is decided in memory."""
MAX_STEPS = 10**9
"""With examples of a step, a position in the data that 64 bits hold."""
MAX_SEED = INT64_MAX
MAX_BATCHES = 10_000
"""Of what is drawn to see how batches differ."""
MAX_NODES = 100_000
MAX_RANKS_PER_NODE = 1024
MAX_RANKS = 2**20
"""Of a job."""
MAX_EXAMPLES_TIMES_RANKS = 10**10
"""Of a step that is planned or simulated: what takes half a minute."""

NumRanks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
NumExamples = Annotated[int, Field(ge=1, le=MAX_EXAMPLES)]
NumLayers = Annotated[int, Field(ge=1, le=16 * MAX_LAYERS)]
"""Of every kind, of which a transformer layer may be several."""
Count = Annotated[int, Field(ge=0, le=2**40)]
"""Of whatever else is counted: elements of a row, rows of an item."""
Parameters = Annotated[int, Field(ge=0, le=10**16)]
"""Of a layer; bytes that are counted from them fit into 64 bits."""
Bytes = Annotated[int, Field(ge=1, le=10**18)]
BytesPerSecond = Annotated[float, Field(gt=0, le=1e21)]
OperationsPerSecond = Annotated[float, Field(gt=0, le=1e24)]
Seconds = Annotated[float, Field(ge=0, le=1e3)]
"""Of a message of nothing."""
Rate = Annotated[float, Field(ge=1e-6, le=1e12)]
"""In the units of settings: 10^12 operations, or 10^9 bytes, a second."""
Latency = Annotated[float, Field(ge=0, le=1e9)]
"""Microseconds, as settings have them."""


def check_size(num_examples: int, num_ranks: int) -> None:
    """Raises UserError for a step whose examples and ranks are each within bounds, and too many together."""
    if num_examples * num_ranks > MAX_EXAMPLES_TIMES_RANKS:
        raise UserError(
            f"A batch of {num_examples:,} examples on {num_ranks:,} ranks is too large to simulate: examples times "
            f"ranks may be {MAX_EXAMPLES_TIMES_RANKS:,}."
        )
