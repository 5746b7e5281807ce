"""Numbers within limits, as fields of what pydantic reads.

The limits themselves, in limits.py, need no pydantic, for which `motet --help` should not wait.
"""

from typing import Annotated

from pydantic import Field

from motet.core.limits import MAX_EXAMPLES, MAX_LAYERS, MAX_RANKS

NumRanks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
NumExamples = Annotated[int, Field(ge=1, le=MAX_EXAMPLES)]
NumLayers = Annotated[int, Field(ge=1, le=16 * MAX_LAYERS)]
"""A number of layers of all kinds; a transformer layer may be several layers."""
Count = Annotated[int, Field(ge=0, le=2**40)]
"""Any other number: elements of a row, rows of an item."""
Parameters = Annotated[int, Field(ge=0, le=10**16)]
"""A number of parameters of a layer; its bytes fit into 64 bits."""
Bytes = Annotated[int, Field(ge=1, le=10**18)]
BytesPerSecond = Annotated[float, Field(gt=0, le=1e21)]
OperationsPerSecond = Annotated[float, Field(gt=0, le=1e24)]
Seconds = Annotated[float, Field(ge=0, le=1e3)]
"""The latency of a message."""
Rate = Annotated[float, Field(ge=1e-6, le=1e12)]
"""A rate in a setting's units: 10^12 operations, or 10^9 bytes, a second."""
Latency = Annotated[float, Field(ge=0, le=1e9)]
"""A latency in a setting's unit: microseconds."""
