"""Models and steps on a device that CPU tensors pretend to be on: nothing meets what is elsewhere, and nobody waits."""

from pathlib import Path

import pytest

from benchmark import benchmark
from parity import planned, test_context, test_planned, test_schedules, test_tensor_parallel_plans
from pretended import ELSEWHERE, pretend, waits
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


def check(rank, num_ranks, cases):
    device = pretend()
    planned.rank_device = lambda: device
    return planned.check_planned(rank, num_ranks, cases)


@pytest.mark.parametrize("kind", PLANS)
def test_steps_under_plans_are_those_of_one_process(kind):
    assert run_ranks(check, 2, PLANS[kind]) == [[], []]
