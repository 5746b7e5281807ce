"""Clusters by the name of their device: the published figures of a device, and the usual node of such devices.

Sources: the data sheets of NVIDIA and AMD. FLOP/s are dense, without sparsity. A vendor's gigabyte counts as 10^9
bytes; the difference is about what a driver and its communication buffers take. Bandwidths are per direction: NVLink,
Infinity Fabric or PCIe between the ranks of a node, and a rank's share of the network cards of vendors' and clouds'
nodes (A40: the testbed of Cornstarch section 6.1). The latency of a message is NCCL's own assumption (`hwLatencies` of
its ring, protocol Simple): NVLink 3.4 us, PCIe 5.7 us, network 14 us.

`[cluster]` of a recipe can replace every number. The device "cpu" is this machine (`cost/cpu.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from motet.core.cluster import Cluster, Device, Link, TensorTransport, check_pieces
from motet.core.errors import ArgumentError
from motet.core.limited import Latency, Rate
from motet.core.limits import MAX_NODES, MAX_PIECES, MAX_RANKS_PER_NODE
from motet.cost.cpu import measured_cpu

PRECISIONS = ("fp8", "bf16", "fp16", "tf32", "fp32", "fp64")
_NVLINK_S, _PCIE_S, _NETWORK_S = 3.4e-6, 5.7e-6, 14e-6
_PCIE_3, _PCIE_4, _PCIE_5 = 15.75, 31.5, 63.0
_ETHERNET = Link(1.25e9, 50e-6)
"""The assumed link between nodes of CPU ranks, which one machine cannot measure: 10 Gb/s."""


@dataclass(frozen=True)
class _Gpu:
    """The figures of a GPU in the units of data sheets. driver_name: words in the driver's name of the device."""

    driver_name: str
    tflops: Mapping[str, float]
    gbytes: float
    gbytes_per_s: float
    ranks_per_node: int
    intra_gbytes_per_s: float
    inter_gbytes_per_s: float


def _tflops(bf16: float, tf32: float, fp32: float, fp8: float = 0) -> Mapping[str, float]:
    return {"bf16": bf16, "fp16": bf16, "tf32": tf32, "fp32": fp32} | ({"fp8": fp8} if fp8 else {})


_H100 = _tflops(989.4, 494.7, 66.9, 1978.9)
_H100_NVL = _tflops(835, 417, 60, 1671)
_GPUS: Mapping[str, _Gpu] = {
    "a40": _Gpu("A40", _tflops(149.7, 74.8, 37.4), 48, 696, 4, _PCIE_4, 6.25),
    "a100-80g": _Gpu("A100", _tflops(312, 156, 19.5), 80, 2039, 8, 300, 25),
    "a800": _Gpu("A800", _tflops(312, 156, 19.5), 80, 2039, 8, 200, 25),
    "h100": _Gpu("H100", _H100, 80, 3350, 8, 450, 50),
    "h800": _Gpu("H800", _H100, 80, 3350, 8, 200, 50),
    "h200": _Gpu("H200", _H100, 141, 4800, 8, 450, 50),
    "b200": _Gpu("B200", _tflops(2250, 1125, 80, 4500), 180, 8000, 8, 900, 50),
    "gb200": _Gpu("GB200", _tflops(2500, 1250, 80, 5000), 186, 8000, 72, 900, 50),
    "gh200": _Gpu("GH200", _H100, 96, 4000, 1, 450, 50),
    "h100-nvl": _Gpu("H100 NVL", _H100_NVL, 94, 3900, 8, _PCIE_5, 25),
    "h200-nvl": _Gpu("H200 NVL", _H100_NVL, 141, 4800, 8, _PCIE_5, 25),
    "h100-pcie": _Gpu("H100 PCIe", _tflops(756, 378, 51.2, 1513), 80, 2000, 8, _PCIE_5, 25),
    "mi300x": _Gpu("MI300X", _tflops(1307.4, 653.7, 163.4, 2614.9), 192, 5300, 8, 448, 50),
    "v100": _Gpu("V100", {"fp16": 125, "fp32": 15.7}, 32, 900, 8, 150, 6.25),
    "a10": _Gpu("A10", _tflops(125, 62.5, 31.2), 24, 600, 8, _PCIE_4, 1.56),
    "a10g": _Gpu("A10G", _tflops(70, 35, 35), 24, 600, 8, _PCIE_4, 1.56),
    "l40s": _Gpu("L40S", _tflops(362, 183, 91.6, 733), 48, 864, 8, _PCIE_4, 6.25),
    "l40": _Gpu("L40", _tflops(181, 90.5, 90.5, 362), 48, 864, 8, _PCIE_4, 6.25),
    "l4": _Gpu("L4", _tflops(121, 60, 30.3, 242), 24, 300, 8, _PCIE_4, 1.56),
    "t4": _Gpu("T4", {"fp16": 65, "fp32": 8.1}, 16, 300, 8, _PCIE_3, 1.56),
    "rtx-4090": _Gpu("RTX 4090", _tflops(165.2, 82.6, 82.6, 330.3), 24, 1008, 8, _PCIE_4, 1.56),
    "rtx-3090": _Gpu("RTX 3090", _tflops(71, 35.6, 35.6), 24, 936, 8, _PCIE_4, 1.56),
}

DEVICES: tuple[str, ...] = (*_GPUS, "cpu")
"""The names that `cluster` and `[cluster] device` take."""


def cluster(device: str, num_nodes: int = 1, ranks_per_node: int | None = None) -> Cluster:
    """A cluster of `num_nodes` usual nodes of a device. "cpu" is measured, in less than a second.

    ranks_per_node: by default that of the usual node.
    Raises ArgumentError for a device that is not in the catalogue, and for counts below 1.
    """
    name = _known(device)
    if num_nodes < 1 or (ranks_per_node is not None and ranks_per_node < 1):
        raise ArgumentError(f"{num_nodes} nodes of {ranks_per_node} ranks: both counts must be at least 1.")
    usual = _cpu(ranks_per_node) if name == "cpu" else _gpu(name)
    return replace(usual, num_nodes=num_nodes, ranks_per_node=ranks_per_node or usual.ranks_per_node)


def device_called(driver_name: str) -> Device | None:
    """The device that a driver calls by this name, e.g. "NVIDIA H100 80GB HBM3"; None if it is not in the catalogue."""
    # The longest name first: an "H100 NVL" is no "H100".
    for name, gpu in sorted(_GPUS.items(), key=lambda item: -len(item[1].driver_name)):
        if re.search(rf"\b{gpu.driver_name}\b", driver_name):
            return _gpu(name).device
    return None


class ClusterConfig(BaseModel):
    """`[cluster]` of a recipe: the cluster that a job is planned for. Absent keys have the catalogue's values."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    device: str = Field(description=f"one of {', '.join(DEVICES)}; cpu is measured")
    nodes: int = Field(1, gt=0, le=MAX_NODES, description="the number of nodes")
    ranks_per_node: int | None = Field(None, gt=0, le=MAX_RANKS_PER_NODE, description="devices of a node")
    peak_tflops: dict[str, Rate] = Field(
        default_factory=dict, description=f"10^12 operations a second, dense, by precision: {', '.join(PRECISIONS)}"
    )
    memory_gbytes: float | None = Field(None, ge=1e-3, le=1e9, description="10^9 bytes of a device")
    memory_gbytes_per_s: Rate | None = Field(None, description="that a device reads from its memory")
    intra_node_gbytes_per_s: Rate | None = Field(None, description="that a rank sends inside a node")
    intra_node_latency_us: Latency | None = Field(None, description="of a message inside a node")
    inter_node_gbytes_per_s: Rate | None = Field(None, description="that a rank sends to another node")
    inter_node_latency_us: Latency | None = Field(None, description="of a message to another node")
    tensor_pieces: int = Field(
        1,
        gt=0,
        le=MAX_PIECES,
        description="in which tensor parallelism hides messages behind products, in training too; 1 hides none",
    )
    tensor_transport: TensorTransport = Field(
        "collectives", description="of pieces, in training; copy_engines copies between the GPUs of a node"
    )

    @field_validator("device")
    @classmethod
    def _device_known(cls, device: str) -> str:
        return _known(device)

    @field_validator("peak_tflops")
    @classmethod
    def _precisions_known(cls, given: dict[str, float]) -> dict[str, float]:
        for precision in given:
            if precision not in PRECISIONS:
                raise ValueError(f"there is no precision {precision!r}; those with a peak are {', '.join(PRECISIONS)}")
        return given

    @model_validator(mode="after")
    def _pieces_travel(self) -> ClusterConfig:
        check_pieces(self.tensor_pieces, self.tensor_transport)
        return self

    def cluster(self) -> Cluster:
        """The catalogue's cluster, with the numbers that are given here."""
        usual = cluster(self.device, self.nodes, self.ranks_per_node)
        peak_flops = {**usual.device.peak_flops, **{name: 1e12 * peak for name, peak in self.peak_tflops.items()}}
        device = Device(
            usual.device.name,
            peak_flops,
            usual.device.memory_bytes if self.memory_gbytes is None else int(1e9 * self.memory_gbytes),
            _or(self.memory_gbytes_per_s, 1e9, usual.device.memory_bytes_per_s),
            usual.device.overlaps,
        )
        intra_node = Link(
            _or(self.intra_node_gbytes_per_s, 1e9, usual.intra_node.bytes_per_s),
            _or(self.intra_node_latency_us, 1e-6, usual.intra_node.latency_s),
        )
        inter_node = Link(
            _or(self.inter_node_gbytes_per_s, 1e9, usual.inter_node.bytes_per_s),
            _or(self.inter_node_latency_us, 1e-6, usual.inter_node.latency_s),
        )
        return replace(
            usual,
            device=device,
            intra_node=intra_node,
            inter_node=inter_node,
            tensor_pieces=self.tensor_pieces,
            tensor_transport=self.tensor_transport,
        )


def _or(given: float | None, unit: float, usual: float) -> float:
    return usual if given is None else given * unit


def _known(device: str) -> str:
    name = device.lower()
    if name not in DEVICES:
        raise ArgumentError(f"there is no device {device!r} in the catalogue; it has {', '.join(DEVICES)}.")
    return name


def _gpu(name: str) -> Cluster:
    gpu = _GPUS[name]
    return Cluster(
        Device(name, {p: 1e12 * peak for p, peak in gpu.tflops.items()}, int(1e9 * gpu.gbytes), 1e9 * gpu.gbytes_per_s),
        1,
        gpu.ranks_per_node,
        Link(1e9 * gpu.intra_gbytes_per_s, _NVLINK_S if gpu.intra_gbytes_per_s > _PCIE_5 else _PCIE_S),
        Link(1e9 * gpu.inter_gbytes_per_s, _NETWORK_S),
    )


def _cpu(ranks_per_node: int | None) -> Cluster:
    cpu = measured_cpu()
    ranks_per_node = ranks_per_node or cpu.num_cores
    device = Device("cpu", cpu.flops_per_s, cpu.memory_bytes // ranks_per_node, cpu.memory_bytes_per_s, overlaps=False)
    return Cluster(device, 1, ranks_per_node, Link(cpu.link_bytes_per_s, cpu.link_latency_s), _ETHERNET)
