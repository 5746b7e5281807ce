"""What attention asks of the host is made by the thread that loads, and a step in the trainer's thread finds it."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.nn.functional import pad

from benchmark import benchmark
from cli.tiny_job import metrics
from dist.test_planned import train_under
from motet.core.block_table import BlockTable
from motet.core.context_rows import ContextRows
from motet.core.plan import Plan, Unit
from motet.core.plan_file import write_plan
from motet.cost.catalogue import cluster
from motet.models import attention, table_items
from motet.models.flex import FlexTable
from motet.models.scores import attended
from motet.planning.planned_recipe import read_job_recipe
from motet.runtime import planned_step, step
from ranks import run_ranks

GIVEN = (
    "data.heldout=[]",
    "run.dtype=float64",
    "run.steps=3",
    "run.batch_size=4",
    "model.encoders.audio.config.dropout=0.0",
    'model.backbone.bidirectional=["image"]',
)
GEMMA = (
    "model.backbone.family=gemma3",
    "model.backbone.config={ hidden_size = 32, intermediate_size = 48, num_hidden_layers = 3, num_attention_heads = 2, "
    "num_key_value_heads = 2, head_dim = 16, sliding_window = 6, "
    "layer_types = ['sliding_attention', 'full_attention', 'sliding_attention'] }",
)
WINDOWS = (
    "model.encoders.image.family=qwen2_5_vl",
    "model.encoders.image.config={ depth = 2, hidden_size = 16, intermediate_size = 24, num_heads = 2, "
    "out_hidden_size = 32, patch_size = 4, temporal_patch_size = 1, in_channels = 1, window_size = 16, "
    "fullatt_block_indexes = [1] }",
)
MAKERS = {"blocks": (BlockTable, "of"), "tiles": (table_items, "plan_tiles"), "calls": (attention, "plan_calls")}
MAKERS |= {"keys": (ContextRows, "wanted")}


def by_blocks(table, query, key, value, scale, softcap, sinks):
    """As flex attention, with gradients on a CPU. It reads what a device has of the table."""
    keys = torch.arange(key.shape[2], device=key.device)
    inside = (table.start[:, :, None] <= keys) & (keys < table.end[:, :, None])
    rows = pad(query, (0, 0, 0, table.missing_rows))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    assert len(table.blocks) == 8
    return attended(rows, key, value, inside.any(0), scale, softcap, sinks)[:, :, : query.shape[2]]


def trained(rank, num_ranks, recipe, overrides, plan, has_blocks, is_ahead):
    """Train, and tell how often what was made in which thread, of all that was made there within steps."""
    made, main = Counter(), threading.main_thread()
    in_step = [False]

    def noting(what, owner, name):
        make = getattr(owner, name)

        def noted(*arguments, **options):
            if threading.current_thread() is not main:
                made[what, "loading"] += 1
            elif in_step[0]:
                made[what, "step"] += 1
            return make(*arguments, **options)

        is_class = isinstance(vars(owner)[name], classmethod)
        return mock.patch.object(owner, name, staticmethod(noted) if is_class else noted)

    def within(owner):
        run = owner.run

        def noted(*arguments):
            in_step[0] = True
            try:
                return run(*arguments)
            finally:
                in_step[0] = False

        return mock.patch.object(owner, "run", noted)

    with ExitStack() as patched:
        for what, (owner, name) in MAKERS.items():
            patched.enter_context(noting(what, owner, name))
        for owner in (step.TrainStep, planned_step.PlannedStep):
            patched.enter_context(within(owner))
        if has_blocks:
            patched.enter_context(mock.patch.object(table_items, "has_flex", lambda asked: not asked.dropout))
            patched.enter_context(mock.patch.object(FlexTable, "attend", by_blocks))
        if not is_ahead:
            for module in (step, planned_step):
                patched.enter_context(mock.patch.object(module, "make_ahead", return_value=None))
        train_under(rank, num_ranks, recipe, overrides, plan)
    return made


def check_loading(job, tmp_path, num_ranks, given, plan=None, *, has_blocks=True):
    """How often what was made by the threads that load. In steps nothing is, and no bit of one differs for it."""
    if plan is not None:
        write_plan(plan, tmp_path / "plan.json")
        plan = str(tmp_path / "plan.json")
    made, told = [], []
    for is_ahead in (True, False):
        run_dir = tmp_path / ("ahead" if is_ahead else "asked")
        overrides = [*given, f"run.dir={run_dir}"]
        made.append(sum(run_ranks(trained, num_ranks, str(job), overrides, plan, has_blocks, is_ahead), Counter()))
        told.append([(step["loss"], step["grad_norm"]) for step in metrics(run_dir)])
    assert told[0] == told[1] and len(told[0]) == 3
    ahead, asked = made
    assert {thread for _, thread in ahead} == {"loading"}, ahead
    assert {what for what, thread in asked if thread == "step"} == {what for what, _ in ahead}, (ahead, asked)
    return Counter({what: count for (what, _), count in ahead.items()})


def plan_of(job, given, *units):
    where = cluster("h100", 1, max(unit.ranks.stop for unit in units))
    device = replace(where.device, peak_flops={**where.device.peak_flops, "fp64": 1e12}, overlaps=False)
    model = read_job_recipe(job, given).model
    return Plan(model, replace(where, device=device), units, 4, 1, precision="fp64")


def test_windows_and_images_in_data_parallelism(job, tmp_path):
    """A table of blocks for each microbatch and window. Segments of the encoder are calls of kernels."""
    made = check_loading(job, tmp_path, 2, [*GIVEN, *GEMMA, *WINDOWS])
    assert made["blocks"] >= 6 and made["calls"] >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), ("fsdp.param_dtype=float32",), ("model.backbone.config.attention_dropout=0.1",)]
)
def test_tiles_of_kernels_without_blocks(job, tmp_path, options):
    assert check_loading(job, tmp_path, 2, [*GIVEN, *GEMMA, *options], has_blocks=False)["tiles"] >= 6


def test_stages_of_a_pipeline(job, tmp_path):
    given = [*GIVEN, *GEMMA, *WINDOWS]
    chain = Unit("all", ({"image": 2, "audio": 1, "backbone": 1}, {"backbone": 2}), pp=2)
    made = check_loading(job, tmp_path, 2, given, plan_of(job, given, chain))
    assert made["blocks"] >= 6 and made["calls"] >= 3


@pytest.mark.parametrize("exchange", ["group_cast", pytest.param("auto", marks=pytest.mark.slow)])
def test_ranks_that_share_sequences_and_items(job, tmp_path, exchange):
    given = [*GIVEN, *GEMMA, *WINDOWS, f"context.exchange={exchange}"]
    unit = Unit("all", ({"image": 2, "audio": 1, "backbone": 3},), cp=2)
    made = check_loading(job, tmp_path, 2, given, plan_of(job, given, unit))
    assert made["blocks"] >= 12 and made["keys"] >= 12


@pytest.mark.slow
def test_ranks_that_share_what_is_cut(job, tmp_path):
    options = ("balance.method=split", "balance.speed={ device_tflops = 1e-6, link_latency_us = 0.0 }")
    made = check_loading(job, tmp_path, 3, [*GIVEN, *GEMMA, *WINDOWS, *options, "run.batch_size=3"])
    assert made["blocks"] >= 6 and made["keys"] >= 6


@pytest.mark.slow
def test_products_that_ranks_share(job, tmp_path):
    given = [*GIVEN, *GEMMA]
    unit = Unit("all", ({"image": 1, "audio": 1, "backbone": 3},), tp=2)
    assert check_loading(job, tmp_path, 2, given, plan_of(job, given, unit))["blocks"] >= 12


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2])
def test_rows_that_are_keys(tmp_path, cp):
    """Of Llama 3.2 Vision: who sees the rows of images, and which rows see padding."""
    with benchmark("whole_models") as whole_models:
        job = whole_models.write_job(tmp_path, "mllama")
    given = ["data.heldout=[]", "run.dtype=float64", "run.steps=3", "run.batch_size=4"]
    model = read_job_recipe(job, given).model
    stages = ({name: len(model.module(name).blocks) for name in ("image", "backbone")},)
    made = check_loading(job, tmp_path, 2, given, plan_of(job, given, Unit("all", stages, dp=2 // cp, cp=cp)))
    assert made["blocks"] >= 6
