"""Models and steps on a device that CPU tensors pretend to be on: nothing meets what is elsewhere, and nobody waits."""

from pathlib import Path

import pytest
import torch

from benchmark import benchmark
from motet.runtime.fsdp import FSDPConfig
from motet.runtime.planned_step import PlannedStep
from motet.runtime.step import TrainStep
from parity import planned, test_context, test_planned, test_schedules, test_tensor_parallel_plans
from parity.test_gradients import Case, run_case
from pretended import ELSEWHERE, pretend, waits, waits_of
from ranks import run_ranks

with benchmark("whole_models") as whole_models, benchmark("against_transformers") as against:
    FAMILIES = list(whole_models.FAMILIES)
SOON = {"llava", "paligemma", "mllama", "qwen2_5_vl", "qwen2_audio"}
"""Families in which rows, prefixes, keys, windows and clips are looked up. The others follow in slow tests."""
KNOWN = ("models/experts.py",)
"""Each layer learns there how many rows each expert has (docs/gpu_checks.md)."""
PLANS = {
    "chain": test_planned.CASES[:3],
    "cp": test_context.OF_BACKBONES[2][:2],
    "zb_v": test_schedules.cases_of("zb_v", 2)[:2],
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


def read_once(waited, num_steps, module):
    """Whether a rank has waited once a step, at the end, for all that the host reads."""
    [((place, what), count)] = waited.items()
    return place.startswith(f"runtime/{module}:") and (what, count) == ("tolist", num_steps)


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
            assert read_once(waited, 1, "step.py"), (config, waited)


def check(rank, num_ranks, cases):
    """What differs from one process, and where the host waits in all steps."""
    device = pretend()
    planned.rank_device = lambda: device
    with waits_of(PlannedStep) as waited, waits_of(TrainStep) as of_data_parallel:
        return planned.check_planned(rank, num_ranks, cases), {**waited, **of_data_parallel}


@pytest.mark.parametrize("kind", PLANS)
def test_steps_under_plans_are_those_of_one_process_and_nobody_waits(kind):
    for wrong, waited in run_ranks(check, 2, PLANS[kind]):
        assert wrong == []
        assert read_once(waited, planned.NUM_STEPS_OF_TESTS * len(PLANS[kind]), "planned_step.py"), waited
