"""Peaks of known GPUs, by the name that PyTorch gives; what is not known is measured."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from motet.train.report import peak


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA H200", torch.bfloat16, 989.4e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5e12),
        ("NVIDIA A10", torch.bfloat16, 125e12),
        ("NVIDIA A10G", torch.bfloat16, 70e12),
        ("Tesla V100-SXM2-32GB", torch.float16, 125e12),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, None),
        ("NVIDIA RTX A4000", torch.bfloat16, None),
        ("NVIDIA L40S", torch.bfloat16, 362e12),
        ("NVIDIA L4", torch.bfloat16, 121e12),
        ("Some GPU of the future", torch.bfloat16, None),
        ("NVIDIA H200", torch.float64, None),
    ],
)
def test_the_peak_of_a_gpu_is_its_vendors_figure_if_that_is_known(name, dtype, expected, monkeypatch):
    """Otherwise the GPU is measured; here on the CPU, with a tiny matrix."""
    ones = torch.ones
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr("torch.ones", lambda *shape, dtype, device: ones(1, 1, dtype=dtype))
    found = peak.peak_of(torch.device("cuda"), dtype)
    assert found.source == ("measured" if expected is None else "catalogue")
    assert expected is None or found.flops_per_s == pytest.approx(expected)


def test_a_cpu_is_measured(monkeypatch):
    """Operations over seconds, once it is warm: by a clock that shows 50 ms more each time it is read."""
    done: list[int] = []  # Operations, whenever the clock is read.

    def clock() -> float:
        done.append(counter.get_total_flops())
        return 0.05 * len(done)

    monkeypatch.setattr("time.perf_counter", clock)
    with FlopCounterMode(display=False) as counter:
        found = peak.peak_of(torch.device("cpu"), torch.float32)
    _, warm, *_ = done
    assert 0 < warm < done[-1]
    assert found.source == "measured"
    assert found.flops_per_s == pytest.approx((done[-1] - warm) / (0.05 * (len(done) - 2) / 2))
