"""Clusters by name: published numbers, each of which a recipe may state otherwise; a CPU is measured."""

import subprocess
import sys

import numpy as np
import pytest
from pydantic import ValidationError

from motet.core.cluster import Cluster, Device, Link
from motet.core.errors import ArgumentError, UserError
from motet.core.limits import check_size
from motet.cost.catalogue import DEVICES, ClusterConfig, cluster, device_called
from motet.cost.cpu import measured_cpu

GPUS = [name for name in DEVICES if name != "cpu"]


def test_the_units_of_data_sheets_become_bytes_operations_and_seconds():
    found = cluster("h100")
    assert found.device.peak_flops["bf16"] == pytest.approx(989.4e12)
    assert found.device.memory_bytes == 80e9
    assert found.device.memory_bytes_per_s == pytest.approx(3.35e12)
    assert (found.intra_node.bytes_per_s, found.inter_node.bytes_per_s) == pytest.approx((450e9, 50e9))


@pytest.mark.parametrize(("device", "original_device"), [("h800", "h100"), ("a800", "a100-80g")])
def test_export_versions_have_the_chip_of_the_original_and_slower_links(device, original_device):
    exported, original = cluster(device), cluster(original_device)
    assert exported.device.peak_flops == original.device.peak_flops
    assert exported.device.memory_bytes_per_s == original.device.memory_bytes_per_s
    assert exported.intra_node.bytes_per_s < original.intra_node.bytes_per_s


@pytest.mark.parametrize("name", GPUS)
def test_every_device_is_plausible(name):
    found = cluster(name, num_nodes=3)
    assert found.num_ranks == 3 * found.ranks_per_node
    # Slower formats are never faster, memory is faster than links, and nodes are further apart than ranks in one.
    peaks = found.device.peak_flops
    order = [peaks[precision] for precision in ("fp8", "fp16", "tf32", "fp32") if precision in peaks]
    assert order == sorted(order, reverse=True)
    assert found.device.memory_bytes_per_s > found.intra_node.bytes_per_s > found.inter_node.bytes_per_s
    assert found.intra_node.latency_s < found.inter_node.latency_s


def test_links_are_ordered_by_kind():
    nvlink, pcie, network = cluster("h100").intra_node, cluster("a40").intra_node, cluster("a40").inter_node
    assert nvlink.bytes_per_s > pcie.bytes_per_s > network.bytes_per_s
    assert nvlink.latency_s < pcie.latency_s < network.latency_s


def test_a_cluster_of_thousands():
    found = cluster("H100", num_nodes=320)
    assert found.num_ranks == 2560
    assert found.link(range(8)) == found.intra_node
    assert found.link([7, 8]) == found.inter_node


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A10G", "a10g"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA RTX A4000", None),
    ],
)
def test_a_device_is_known_by_its_drivers_name(driver_name, name):
    found = device_called(driver_name)
    assert (found and found.name) == name


def test_a_recipe_states_numbers_otherwise():
    config = ClusterConfig(
        device="h100", nodes=2, ranks_per_node=4, peak_tflops={"bf16": 500.0}, memory_gbytes=40,
        memory_gbytes_per_s=1000, intra_node_gbytes_per_s=100, intra_node_latency_us=7,
        inter_node_gbytes_per_s=10, inter_node_latency_us=20, tensor_pieces=4,
    )  # fmt: skip
    found, usual = config.cluster(), cluster("h100")
    assert (found.num_nodes, found.ranks_per_node) == (2, 4)
    assert found.device.peak_flops["bf16"] == 500e12
    assert found.device.peak_flops["fp32"] == usual.device.peak_flops["fp32"]
    assert (found.device.memory_bytes, found.device.memory_bytes_per_s) == (40e9, 1000e9)
    assert found.intra_node == Link(100e9, 7 * 1e-6)
    assert found.inter_node == Link(10e9, 20 * 1e-6)
    assert found.tensor_pieces == 4 and usual.tensor_pieces == 1


def test_pieces_are_refused_where_nothing_is_computed_beside_collectives():
    """They would be slower, and hide nothing."""
    device = Device("slow", {"fp32": 1e12}, 10**9, 1e10, overlaps=False)
    with pytest.raises(ArgumentError, match="tensor_pieces is 2, but ranks on 'slow' compute nothing while"):
        Cluster(device, 1, 2, Link(1e9, 1e-5), Link(1e9, 1e-5), tensor_pieces=2)
    with pytest.raises(ArgumentError, match="tensor_transport is 'copy_engines', by which pieces of products travel"):
        Cluster(device, 1, 2, Link(1e9, 1e-5), Link(1e9, 1e-5), tensor_transport="copy_engines")


def test_what_a_recipe_does_not_state_is_usual():
    assert ClusterConfig(device="b200", nodes=4).cluster() == cluster("b200", num_nodes=4)


def test_wrong_names_and_counts():
    with pytest.raises(ArgumentError, match="no device 'h1000' in the catalogue; it has a40, a100-80g"):
        cluster("h1000")
    with pytest.raises(ValidationError, match="no device 'h1000' in the catalogue"):
        ClusterConfig(device="h1000")
    with pytest.raises(ValidationError, match="there is no precision 'bf61'; those with a peak are fp8, bf16"):
        ClusterConfig(device="h100", peak_tflops={"bf61": 1})
    with pytest.raises(ValidationError, match=r"greater than or equal to 0\.000001"):
        ClusterConfig(device="h100", peak_tflops={"bf16": -1})
    with pytest.raises(ArgumentError, match="0 nodes of None ranks: both counts must be at least 1"):
        cluster("h100", num_nodes=0)


def test_a_cpu_is_measured_once(monkeypatch):
    found = cluster("cpu", num_nodes=2)
    assert found.ranks_per_node == measured_cpu().num_cores
    assert set(found.device.peak_flops) == {"fp32", "fp64"}
    figures = (*found.device.peak_flops.values(), found.device.memory_bytes_per_s, *vars(found.intra_node).values())
    assert all(np.isfinite(figure) and figure > 0 for figure in figures)
    monkeypatch.delattr(subprocess, "Popen")  # Measuring starts a process.
    assert cluster("cpu", num_nodes=2) == found
    assert cluster("cpu", ranks_per_node=1).device.memory_bytes >= found.device.memory_bytes


def test_measuring_a_cpu_needs_no_torch():
    script = "import sys; from motet.cost.catalogue import cluster; cluster('cpu'); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_ranks_are_bounded_by_their_product():
    assert ClusterConfig(device="a40", nodes=1024, ranks_per_node=1024).cluster().num_ranks == 2**20
    with pytest.raises(
        ArgumentError, match=r"1,025 nodes of 1,024 ranks are 1,049,600 ranks; there may be 1,048,576\."
    ):
        ClusterConfig(device="a40", nodes=1025, ranks_per_node=1024).cluster()


def test_a_step_is_bounded_by_its_examples_and_ranks_together():
    check_size(10**5, 10**5)
    with pytest.raises(UserError, match="1,000,000 examples on 200,000 ranks is too large to simulate"):
        check_size(10**6, 200_000)
