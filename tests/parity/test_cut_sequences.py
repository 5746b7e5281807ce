"""Steps in which ranks share some sequences and images equal one process, each over its own ranks: float64, 1e-10.

benchmarks/fuzz_plans.py draws such steps, too: one in ten of its cases.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from motet.runtime.fsdp import FSDPConfig
from parity.cut_steps import Cut, errors_of_cut
from parity.planned import TOLERANCE, differences
from parity.test_gradients import Case
from ranks import run_ranks
from tiers import in_tiers


def check(rank: int, num_ranks: int, cuts: list[Cut]) -> list[str]:
    """What differs from one process, on rank 0; that a case cuts what it is for, on all."""
    wrong = []
    for cut in cuts:
        errors = errors_of_cut(cut, cuts_something=True)
        wrong += [f"{cut}: {line}" for line in differences(errors, TOLERANCE)]
        dist.barrier()
    return wrong


WHOLE_COPIES, HYBRID = FSDPConfig(shard_size=1), FSDPConfig(shard_size=2)
ALL = Case(phases="all", method="per_phase")
DEGREES = Cut(ALL, degrees=(4, 2, 1, 2, 4, 1))
CUTS = [
    DEGREES,
    replace(DEGREES, case=replace(ALL, fsdp=WHOLE_COPIES)),
    replace(DEGREES, case=replace(ALL, fsdp=HYBRID, num_microbatches=2)),
    Cut(replace(ALL, num_microbatches=3, fsdp=FSDPConfig(recompute=True))),
    Cut(replace(ALL, num_microbatches=3, fsdp=FSDPConfig(shard_size=1, recompute={"backbone": 1}))),
    Cut(replace(ALL, frozen=("image encoder", "audio"))),
    Cut(replace(ALL, frozen=("backbone",))),
    Cut(replace(ALL, contents=(), num_examples=5)),
    Cut(replace(ALL, num_examples=1), degrees=(4,)),
    Cut(ALL, idle=1, degrees=(2,)),
    Cut(ALL, idle=1, degrees=(2,), dropout=True),
    Cut(replace(ALL, num_microbatches=2, seed=5), dropout=True),
    Cut(replace(ALL, seed=2), enters_again=True),
    # Rows that see each other in both directions, in whole sequences and in shared ones.
    replace(DEGREES, together=("images",)),
    Cut(replace(ALL, num_microbatches=2, seed=3, fsdp=FSDPConfig(recompute=True)), together=("images", "prefix")),
    Cut(replace(ALL, seed=6, family="gemma2"), together=("prefix",), dropout=True, idle=1),
    # A merge of the user's own has whole sequences, and rows enter again behind it.
    replace(DEGREES, merges=True),
    Cut(replace(ALL, num_microbatches=2, seed=2, fsdp=HYBRID), merges=True, enters_again=True, dropout=True, idle=1),
    Cut(replace(ALL, seed=5, fsdp=WHOLE_COPIES, frozen=("backbone",)), merges=True, together=("images",)),
    Cut(replace(ALL, seed=7, frozen=("image",)), merges=True, enters_again=True),
    Cut(replace(ALL, contents=(), num_examples=5, fsdp=FSDPConfig(recompute=True)), merges=True),
]


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers({4: CUTS}, {4: (0, 3, 10, 14, 17)}))
def test_degrees_of_one_two_and_four_in_one_microbatch_equal_one_process(num_ranks, cases):
    assert run_ranks(check, num_ranks, cases) == [[]] * num_ranks


IMAGES = replace(ALL, contents=("image",))
ITEMS = [
    # Degrees 4, 2 and 1 of images in one microbatch, beside whole sequences; then beside cut ones.
    Cut(ALL, degrees=(), tower="qwen2_vl", items=(4, 2, 1, 2, 4, 1)),
    Cut(ALL, degrees=(4, 2, 1, 2), tower="siglip", items=(4, 2, 1, 2, 4, 1)),
    Cut(replace(ALL, fsdp=WHOLE_COPIES, num_microbatches=2), tower="siglip", draws_items=True),
    Cut(replace(ALL, fsdp=FSDPConfig(recompute=True), num_microbatches=2), tower="qwen2_vl", draws_items=True),
    Cut(ALL, degrees=(), tower="pixtral", items=(2, 4)),
    Cut(replace(ALL, frozen=("image encoder",)), degrees=(), tower="siglip2", items=(2, 4)),
    Cut(replace(ALL, frozen=("image",)), tower="qwen2_vl", items=(2, 4)),
    Cut(replace(ALL, frozen=("backbone", "audio")), degrees=(), tower="qwen2_vl", items=(4,)),
    Cut(ALL, degrees=(2,), tower="whole qwen2_vl", items=(4, 2, 1, 2)),
    # Windows: some stay on a rank, and ranks share others.
    Cut(ALL, degrees=(4, 2, 1, 2), tower="whole qwen2_5_vl", items=(4, 2, 1, 2, 4, 1)),
    Cut(replace(ALL, fsdp=FSDPConfig(recompute=True), num_microbatches=2), tower="qwen2_5_vl", draws_items=True),
    Cut(replace(IMAGES, num_examples=5), degrees=(), tower="qwen2_5_vl", items=(2,), idle=2),
    # Rows of an inner block go along, and enter the backbone before its second.
    Cut(ALL, degrees=(2,), tower="whole qwen3_vl", items=(4, 2, 1, 2)),
    Cut(replace(ALL, fsdp=FSDPConfig(recompute=True), num_microbatches=2), tower="qwen3_vl", draws_items=True),
    Cut(ALL, degrees=(2,), tower="whole qwen3_vl", items=(4, 2, 1, 2), merges=True),
    # Tiles, which do not see each other; the last ranks have none.
    Cut(ALL, degrees=(2,), tower="tiled internvl", items=(2, 1, 3)),
    Cut(replace(IMAGES, num_examples=5, fsdp=WHOLE_COPIES), degrees=(), tower="tiled siglip", items=(2,), idle=2),
    # Class rows, which the rank with an image's first row has; three of them an image, of no place.
    Cut(replace(ALL, seed=3), degrees=(2,), tower="clip", items=(4, 2, 1, 2, 4, 1)),
    Cut(replace(ALL, fsdp=FSDPConfig(recompute=True), num_microbatches=2), tower="dinov3", draws_items=True),
    Cut(replace(IMAGES, num_examples=5), degrees=(), tower="dinov2", items=(2, 3), idle=1),
    Cut(replace(ALL, seed=4), degrees=(), tower="internvl", items=(3, 2)),
    Cut(replace(ALL, seed=6), degrees=(2,), tower="eva_clip", items=(4, 2, 1)),
    # Projectors that join or average rows of ranks that share an image, or a clip.
    Cut(replace(ALL, seed=3), degrees=(2,), tower="joined siglip", items=(4, 2, 1, 2, 4, 1)),
    Cut(replace(ALL, fsdp=FSDPConfig(recompute=True), num_microbatches=2), tower="pooled clip", draws_items=True),
    # Sound, whose convolutions see frames of other ranks; some ranks have no clip.
    Cut(replace(ALL, seed=1), degrees=(2,), tower="joined whisper", items=(4, 2, 1, 2), dropout=True),
    Cut(replace(ALL, fsdp=FSDPConfig(recompute=True), num_microbatches=2), tower="whole qwen2_audio", draws_items=True),
    Cut(replace(ALL, contents=("audio",), num_examples=5), degrees=(), tower="qwen2_audio", items=(2,), idle=2),
    Cut(replace(ALL, seed=2, frozen=("audio encoder",)), tower="joined qwen2_5_omni_audio", items=(3, 2), degrees=()),
    # Towers that drop out: in attention, and with class rows.
    Cut(ALL, degrees=(2,), tower="siglip", items=(4, 2, 1, 2), dropout=True),
    Cut(replace(ALL, seed=4), degrees=(), tower="internvl", items=(3, 2), dropout=True, idle=1),
    Cut(ALL, degrees=(2,), tower="tiled internvl", items=(2, 1, 3), dropout=True),
    # Tiles of which ranks have rows, and whose rows become one raster.
    Cut(ALL, degrees=(2,), tower="raster clip", items=(4, 2, 1, 2)),
    Cut(replace(IMAGES, num_examples=5), degrees=(), tower="raster siglip", items=(2, 3), idle=1, dropout=True),
    Cut(replace(ALL, fsdp=FSDPConfig(recompute=True), num_microbatches=2), tower="raster siglip", draws_items=True),
    # Queries that read rows of ranks that share an image, a clip, or a tile of one.
    Cut(replace(ALL, seed=3), degrees=(2,), tower="read siglip", items=(3, 2, 1, 2), dropout=True),
    Cut(replace(IMAGES, num_examples=5), degrees=(), tower="read clip", items=(2, 3), idle=1, dropout=True),
    Cut(replace(ALL, fsdp=FSDPConfig(recompute=True), num_microbatches=2), tower="read qwen2_vl", draws_items=True),
    Cut(replace(ALL, frozen=("audio encoder",), seed=2), degrees=(2,), tower="read whisper", items=(2, 3)),
    Cut(replace(ALL, frozen=("image",), fsdp=WHOLE_COPIES), degrees=(), tower="read siglip", items=(2, 3)),
    Cut(ALL, degrees=(2,), tower="tiled read siglip", items=(2, 1, 3), idle=1),
    Cut(replace(ALL, seed=5), degrees=(2,), tower="uneven read clip", items=(3, 2, 1), dropout=True),
    # Images of one to four tiles that become a row each, which text sees in layers of its own.
    Cut(ALL, degrees=(2,), tower="mllama", items=(4, 2, 1, 3, 4, 1)),
    Cut(replace(IMAGES, num_examples=5), degrees=(), tower="mllama", items=(2, 3), idle=1),
    Cut(replace(ALL, fsdp=FSDPConfig(recompute=True), num_microbatches=2, seed=1), tower="mllama", draws_items=True),
    Cut(replace(ALL, frozen=("image encoder",), fsdp=WHOLE_COPIES), degrees=(2,), tower="mllama", items=(2, 4)),
    # Ranks that have no image, and meet the others in each layer.
    Cut(replace(IMAGES, num_examples=5), degrees=(), tower="siglip", items=(2,), idle=2),
    Cut(replace(IMAGES, num_examples=1, seed=1, fsdp=HYBRID), degrees=(2,), tower="qwen2_vl", items=(2,), idle=2),
]


@pytest.mark.parametrize(("num_ranks", "cases"), in_tiers({4: ITEMS}, {4: (1, 9, 12, 15, 17, 22, 24, 29, 32, 35, 41)}))
def test_images_cut_over_ranks_equal_one_process(num_ranks, cases):
    assert run_ranks(check, num_ranks, cases) == [[]] * num_ranks


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_cuts_anywhere_equal_one_process(num_ranks):
    rng = np.random.default_rng(num_ranks)
    fsdps = (FSDPConfig(), WHOLE_COPIES, FSDPConfig(recompute=True, reshard_after_forward=False))
    cuts = [
        Cut(
            replace(
                ALL,
                seed=seed,
                num_examples=int(rng.integers(3, 14)),
                num_microbatches=int(rng.integers(1, 3)),
                fsdp=fsdps[rng.integers(len(fsdps))],
                frozen=[(), ("image",), ("audio", "backbone")][rng.integers(3)],
            ),
            idle=int(rng.integers(2)) if num_ranks > 2 else 0,
            dropout=bool(rng.integers(2)),
            tower=["", "siglip", "qwen2_vl"][seed % 3],
            draws_items=seed % 3 > 0,
        )
        for seed in range(20, 24)
    ]
    assert run_ranks(check, num_ranks, cuts) == [[]] * num_ranks


CHOSEN = [Cut(replace(ALL, num_examples=2, seed=seed), method="split") for seed in (0, 4)]
CHOSEN += [replace(CHOSEN[0], merges=True)]
"""One of two sequences is longer than the other, so that both ranks have a part of it."""


def test_what_is_chosen_equals_one_process():
    assert run_ranks(check, 2, CHOSEN) == [[]] * 2
