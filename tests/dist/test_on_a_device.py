"""Models and steps on a device that CPU tensors pretend to be on: nothing meets what is elsewhere, and nobody waits."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmark import benchmark
from motet import grouped
from motet.grouped import GroupedLinear
from motet.models.experts import RoutedExperts
from motet.runtime.fsdp import FSDPConfig
from motet.runtime.planned_step import PlannedStep
from motet.runtime.step import TrainStep
from parity import planned, test_context, test_experts, test_planned, test_schedules, test_tensor_parallel_plans
from parity.test_gradients import Case, run_case
from pretended import ELSEWHERE, Pretended, pretend, waits, waits_of
from ranks import run_ranks

with benchmark("whole_models") as whole_models, benchmark("against_transformers") as against:
    FAMILIES = list(whole_models.FAMILIES)
SOON = {"llava", "paligemma", "mllama", "qwen2_5_vl", "qwen2_audio"}
"""Families in which rows, prefixes, keys, windows and clips are looked up. The others follow in slow tests."""
KNOWN = ("models/experts.py",)
"""Each pass of a layer learns there, once, how many rows each expert has (docs/gpu_checks.md)."""
PLANS = {
    "chain": test_planned.CASES[:3],
    "cp": test_context.OF_BACKBONES[2][:2],
    "zb_v": test_schedules.cases_of("zb_v", 2)[:2],
    "data_parallel": [*(test_experts.data_parallel(2, 1, family="qwen2", zero=zero) for zero in (2, 3))],
    "experts": test_experts.CASES[2][2:4],
    "experts tp": test_experts.DIVIDED[2][:1],
    "experts ep": [test_experts.SPREAD[2][0]],
    "experts ep dp": [test_experts.SPREAD_IN_DATA_PARALLEL[2][0]],
    "tp": test_tensor_parallel_plans.IN_CHUNKS[:1],
}
ONCE = FSDPConfig(reshard_after_forward=False, once_a_step=True)
SHARED_OUT = [FSDPConfig(), FSDPConfig(reshard_after_forward=False), ONCE, FSDPConfig(shard_size=1)]
IN_BF16 = [FSDPConfig(param_dtype="bfloat16", reduce_dtype="float32", **how) for how in ({}, {"shard_size": 1})]


def compared(rank, num_ranks, folder):
    """How far loss and gradients are from those on the CPU, and where the host waits in a pass both ways."""
    device = pretend()
    on_host, on_device = against.ours(Path(folder)), against.ours(Path(folder), device=device)
    elsewhere = (ELSEWHERE, *KNOWN)
    return on_device.distance(on_host), [place for place in waits if not place[0].startswith(elsewhere)]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in SOON else pytest.mark.slow) for name in FAMILIES]
)
def test_a_whole_model_is_the_same_on_a_device_and_nobody_waits_for_it(tmp_path, family):
    whole_models.write_job(tmp_path, family)
    [(distance, waited)] = run_ranks(compared, 1, str(tmp_path))
    assert max(distance) < 1e-8
    assert waited == []


def beside_reading(waited, num_steps):
    """Where a rank waits, but for once a step, at its end, for all that the host reads."""
    ends = [key for key in waited if key[0].startswith(("runtime/step.py:", "runtime/planned_step.py:"))]
    assert [(what, waited[place, what]) for place, what in ends] == [("tolist", num_steps)]
    return {key: count for key, count in waited.items() if key not in ends}


def in_data_parallel(rank, num_ranks, cases, dtype):
    """How far loss, norm and gradients of each case are from those on the CPU, and where the host waits in its step."""
    device = pretend()
    found = []
    for case in cases:
        on_host, expected = run_case(case, dtype)
        with waits_of(TrainStep) as waited:
            on_device, gradients = run_case(case, dtype, device)
        assert on_device.sent_bytes == on_host.sent_bytes
        distances = [abs(on_device.loss - on_host.loss), abs(on_device.grad_norm - on_host.grad_norm)]
        distances += [(gradients[name] - it).norm() / it.norm() for name, it in expected.items() if it is not None]
        found.append((max(map(float, distances)), dict(waited)))
    return found


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "tolerance", "configs"),
    [
        (2, torch.float64, 1e-12, [FSDPConfig(recompute=True)]),
        pytest.param(2, torch.float64, 1e-12, SHARED_OUT, marks=pytest.mark.slow),
        pytest.param(2, torch.float32, 0.02, IN_BF16, marks=pytest.mark.slow),
        pytest.param(4, torch.float64, 1e-12, [FSDPConfig(shard_size=2)], marks=pytest.mark.slow),
    ],
    ids=["recomputed", "float64", "bf16", "hybrid"],
)
def test_steps_in_data_parallel_are_those_on_the_host_and_nobody_waits(num_ranks, dtype, tolerance, configs):
    """FSDP2 and whole copies."""
    cases = [Case(num_microbatches=3, fsdp=config) for config in configs]
    for found in run_ranks(in_data_parallel, num_ranks, cases, dtype):
        for config, (distance, waited) in zip(configs, found, strict=True):
            assert distance < tolerance, config
            assert beside_reading(waited, 1) == {}, config


def check(rank, num_ranks, cases):
    """What differs from one process; where the host waits in all steps; how often experts were asked in them."""
    device = pretend()
    planned.rank_device = lambda: device
    asked = []
    ask = RoutedExperts.forward

    def noted(experts, hidden):
        if isinstance(hidden, Pretended):
            asked.append(experts)
        return ask(experts, hidden)

    with (
        mock.patch.object(RoutedExperts, "forward", noted),
        waits_of(PlannedStep) as waited,
        waits_of(TrainStep) as of_data_parallel,
    ):
        wrong = planned.check_planned(rank, num_ranks, cases)
    return wrong, {**waited, **of_data_parallel}, len(asked)


@pytest.mark.parametrize("kind", PLANS)
def test_steps_under_plans_are_those_of_one_process_and_nobody_waits(kind):
    """But once for each pass of a layer of experts."""
    for wrong, waited, num_asked in run_ranks(check, 2, PLANS[kind]):
        assert wrong == []
        left = beside_reading(waited, planned.NUM_STEPS_OF_TESTS * len(PLANS[kind]))
        assert all(place.startswith(KNOWN) for place, _ in left), left
        assert len(left) <= 1 and sum(left.values()) <= num_asked, (left, num_asked)


def in_one_kernel(rank, num_ranks):
    """Where the host waits in products of experts by torch's kernel, of which one has no rows."""
    device = pretend()
    grouped.is_one_kernel = lambda rows, weights: True
    rows, weights = (torch.ones(shape, dtype=torch.bfloat16).to(device) for shape in ((9, 16), (3, 24, 16)))
    weights.requires_grad_()
    before = waits.copy()
    GroupedLinear()(rows, weights, [4, 0, 5]).sum().backward()
    return dict(waits - before), weights.grad.cpu().sum((1, 2)).tolist()


def test_nobody_waits_for_products_of_experts_in_one_kernel():
    assert run_ranks(in_one_kernel, 1) == [({}, [4.0 * 24 * 16, 0.0, 5.0 * 24 * 16])]
