"""Steps in which ranks share some sequences and images equal one process, each over its own ranks: float64, 1e-10."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from motet.core.workload import home_ranks
from motet.dispatch import LoadedExample, RankBatch, assemble
from motet.dispatch.cut_batch import examples_to_lay_out
from motet.dropout import example_keys
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import Mesh
from motet.runtime.step import TrainStep
from parity.collectives import counted_collectives, on_all_ranks
from parity.cut_at_random import cut_at_random, cut_items_at_random
from parity.test_gradients import (
    TOLERANCE,
    Case,
    counted_exchanges,
    lengths_of,
    local,
    mesh_of,
    orchestrator_of,
    relative,
    whole,
)
from parity.tiny import build_model, draw_examples, reference_step
from parity.towers import tower_module, with_patches
from ranks import run_ranks


@dataclass(frozen=True)
class Cut:
    """degrees: of the first examples, one after the other; None: drawn. method: as in a recipe, in place of these.

    idle: ranks that get no row. dropout: of attention, and of the rows that go in. enters_again: rows of images enter
    the backbone a second time.
    tower: a family of vision encoders in place of the toy's. items: degrees of its first images; None: whole or, with
    `draws_items`, drawn.
    """

    case: Case
    degrees: tuple[int, ...] | None = None
    method: str = ""
    idle: int = 0
    dropout: bool = False
    enters_again: bool = False
    tower: str = ""
    items: tuple[int, ...] | None = None
    draws_items: bool = False


def model_of(cut: Cut):
    readers = "sum" if cut.enters_again else cut.case.readers
    model = build_model(torch.float64, cut.case.frozen, readers, cut.case.family)
    model.backbone.bidirectional = ()
    if cut.tower:
        model.encoders["image"] = tower_module(cut.tower, cut.case.frozen)
    if cut.dropout:
        for layer in model.backbone.causal_lm.model.layers:
            layer.self_attn.attention_dropout = 0.3
    return model


def examples_of(cut: Cut) -> list[LoadedExample]:
    case = cut.case
    drawn = draw_examples(case.num_examples, case.seed, case.contents, "sum" if cut.enters_again else case.readers)
    return [with_patches(example, case.seed) for example in drawn] if cut.tower else drawn


def batch_of(examples: list[LoadedExample], model, mesh: Mesh, cut: Cut, number: int) -> RankBatch:
    lengths = replace(lengths_of(model, examples, mesh), home=home_ranks(len(examples), mesh.num_ranks))
    case = replace(cut.case, method=cut.method) if cut.method else cut.case
    decision = orchestrator_of(model, mesh.num_ranks, case).decide(lengths)
    if not cut.method:
        rng = np.random.default_rng((case.seed, number))
        if cut.degrees != ():
            decision = cut_at_random(decision, lengths, rng, cut.degrees, cut.idle)
        if cut.items is not None or cut.draws_items:
            decision = cut_items_at_random(decision, lengths, "image", rng, cut.items, cut.idle)
    items = {p: [m for e in examples for q, m in zip(e.sequence.media, e.media) if q == p] for p in lengths.items}
    return assemble(
        decision,
        lengths,
        mesh.rank,
        [examples[i].sequence for i in decision.sequences_on(mesh.rank)],
        {p: [items[p][i] for i in decision.items_on(p, mesh.rank)] for p in lengths.items},
        shared={int(i): examples[i].sequence for i in examples_to_lay_out(decision.cuts, lengths)},
    )


def check(rank: int, num_ranks: int, cuts: list[Cut]) -> list[str]:
    wrong = []
    for cut in cuts:
        wrong += check_one(cut)
        dist.barrier()
    return wrong


def check_one(cut: Cut) -> list[str]:
    """What differs from the reference, on rank 0."""
    case, mesh = cut.case, mesh_of(cut.case.fsdp.shard_size)
    examples, model = examples_of(cut), model_of(cut)
    keys = example_keys(7, 1, np.arange(len(examples))) if cut.dropout else None
    shard(model, mesh, case.fsdp)
    parts = np.array_split(np.arange(len(examples)), case.num_microbatches)
    batches = [batch_of([examples[i] for i in part], model, mesh, cut, n) for n, part in enumerate(parts)]
    for degrees, phase in ((cut.degrees, "backbone"), (cut.items, "image")):
        if degrees:
            assert set(degrees) - {1} <= set(batches[0].decision.cuts_of(phase).degrees.values())
    assert any(batch.decision.shares_items for batch in batches), "nothing is cut"
    if keys is not None:
        batches = [batch.with_draws(keys[part]) for batch, part in zip(batches, parts, strict=True)]
    with counted_exchanges() as exchanges, counted_collectives() as collectives:
        result = TrainStep(model, mesh, once_a_step=case.fsdp.once_a_step).run(batches)
    collectives["exchange"] += sum(size_bytes for _, size_bytes in exchanges)
    sent_bytes = on_all_ranks(collectives)
    assert result.sent_bytes == pytest.approx(sent_bytes, abs=0.5), (result.sent_bytes, sent_bytes)
    loss, norm, gradients = result.loss, result.grad_norm, {n: p.grad for n, p in model.named_parameters()}
    shards = {name: None if gradient is None else local(gradient) for name, gradient in gradients.items()}
    found = whole(shards, mesh)
    if mesh.rank:
        return []
    reference = model_of(cut)
    expected_loss = reference_step(reference, examples, keys=keys)
    expected = {name: p.grad for name, p in reference.named_parameters()}
    expected_norm = sum(float(g.square().sum()) for g in expected.values() if g is not None) ** 0.5
    pairs = {"loss": (loss, expected_loss), "gradient norm": (norm, expected_norm)}
    wrong = [f"{n}: {a} instead of {b}" for n, (a, b) in pairs.items() if abs(a - b) > TOLERANCE * abs(b)]
    for name, gradient in expected.items():
        if (gradient is None) != (found[name] is None):
            wrong.append(f"{name}: gradient is {found[name]} instead of {gradient}")
        elif gradient is not None and (off := relative(found[name], gradient)) > TOLERANCE:
            wrong.append(f"{name}: off by {off:.1e}")
    return [f"{cut}: {line}" for line in wrong]


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
]


@pytest.mark.parametrize("first", range(0, len(CUTS), 5))
def test_degrees_of_one_two_and_four_in_one_microbatch_equal_one_process(first):
    assert run_ranks(check, 4, CUTS[first : first + 5]) == [[]] * 4


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
    # Ranks that have no image, and meet the others in each layer.
    Cut(replace(IMAGES, num_examples=5), degrees=(), tower="siglip", items=(2,), idle=2),
    Cut(replace(IMAGES, num_examples=1, seed=1, fsdp=HYBRID), degrees=(2,), tower="qwen2_vl", items=(2,), idle=2),
]


@pytest.mark.parametrize("first", range(0, len(ITEMS), 5))
def test_images_cut_over_ranks_equal_one_process(first):
    assert run_ranks(check, 4, ITEMS[first : first + 5]) == [[]] * 4


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
        for seed in range(20, 28)
    ]
    assert run_ranks(check, num_ranks, cuts) == [[]] * num_ranks


def test_what_is_chosen_equals_one_process():
    """One of two sequences is longer than the other, so that both ranks have a part of it."""
    cuts = [Cut(replace(ALL, num_examples=2, seed=seed), method="split") for seed in (0, 4)]
    assert run_ranks(check, 2, cuts) == [[]] * 2
