"""Peak FLOP/s of a device, the denominator of MFU: the vendor's figure if `cost/catalogue.py` has it, else measured.

The ranks of a node measure matmuls at the same time, because they share its cores.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from motet.core.cluster import Device
from motet.train.device import catalogued

_MATMUL_DIM = {"cpu": 512, "cuda": 8192}
_MEASURE_S = 0.2


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one rank's device. source: "catalogue" or "measured"."""

    flops_per_s: float
    source: str


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak:
    """The peak of a device for matmuls in `dtype`. All ranks call it at the same time."""
    if device.type == "cuda" and (known := _peak_in(catalogued(device), dtype)):
        return Peak(known, "catalogue")
    return Peak(_measured(device, dtype), "measured")


def _peak_in(device: Device | None, dtype: torch.dtype) -> float | None:
    if device is None:
        return None
    # A device without tf32 computes in fp32, even if tf32 is allowed.
    fp32 = ("tf32", "fp32") if torch.backends.cuda.matmul.allow_tf32 else ("fp32",)
    precisions = {torch.bfloat16: ("bf16",), torch.float16: ("fp16",), torch.float32: fp32}.get(dtype, ())
    return next((device.peak_flops[name] for name in precisions if name in device.peak_flops), None)


def _measured(device: torch.device, dtype: torch.dtype) -> float:
    dim = _MATMUL_DIM.get(device.type, 2048)
    a = torch.ones(dim, dim, dtype=dtype, device=device)

    def seconds(count: int) -> float:
        start_s = time.perf_counter()
        for _ in range(count):
            a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start_s

    seconds(2)
    count = 0
    spent_s = 0.0
    while spent_s < _MEASURE_S:
        spent_s += seconds(4)
        count += 4
    return 2.0 * dim**3 * count / spent_s
