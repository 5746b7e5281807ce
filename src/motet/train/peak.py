"""Peak FLOP/s of a device, what MFU is a share of: the vendor's figure where it is known, else a measured matmul.

Vendors' figures are dense (without sparsity), from the data sheets of NVIDIA and AMD. On CPUs, and on devices that are
not in the catalogue, the ranks of a node measure at the same time, as they share its cores.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

# Part of the device's name -> TFLOP/s in (bfloat16 or float16, TF32, float32). The first match counts.
_CATALOGUE: tuple[tuple[str, tuple[float, float, float]], ...] = (
    ("GB200", (2500.0, 1250.0, 80.0)),
    ("B200", (2250.0, 1125.0, 80.0)),
    ("H200 NVL", (835.0, 417.0, 60.0)),
    ("H200", (989.4, 494.7, 66.9)),
    ("H100 NVL", (835.0, 417.0, 60.0)),
    ("H100 PCIe", (756.0, 378.0, 51.2)),
    ("H100", (989.4, 494.7, 66.9)),
    ("A100", (312.0, 156.0, 19.5)),
    ("A10", (125.0, 62.5, 31.2)),
    ("L40S", (362.0, 183.0, 91.6)),
    ("L40", (181.0, 90.5, 90.5)),
    ("L4", (121.0, 60.0, 30.3)),
    ("RTX 4090", (165.2, 82.6, 82.6)),
    ("RTX 3090", (71.0, 35.6, 35.6)),
    ("V100", (125.0, 15.7, 15.7)),
    ("T4", (65.0, 8.1, 8.1)),
    ("MI300X", (1307.4, 653.7, 163.4)),
)
_MATMUL_DIM = {"cpu": 512, "cuda": 8192}
_MEASURE_S = 0.2


@dataclass(frozen=True)
class Peak:
    """flops_per_s of one device (one rank); source: "catalogue" or "measured"."""

    flops_per_s: float
    source: str


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak:
    """The peak of the device for matmuls of `dtype`. All ranks call it at the same time."""
    if device.type == "cuda" and (known := _catalogued(torch.cuda.get_device_name(device), dtype)):
        return Peak(known, "catalogue")
    return Peak(_measured(device, dtype), "measured")


def _catalogued(name: str, dtype: torch.dtype) -> float | None:
    column = {torch.bfloat16: 0, torch.float16: 0, torch.float32: 2}.get(dtype)
    if column == 2 and torch.backends.cuda.matmul.allow_tf32:
        column = 1
    figures = next((figures for part, figures in _CATALOGUE if part in name), None)
    return None if figures is None or column is None else figures[column] * 1e12


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
