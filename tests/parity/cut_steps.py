"""A step in which ranks share some sequences and images, each over its own ranks, against one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import numpy as np
import pytest
import torch

from motet.core.workload import BatchLengths, home_ranks
from motet.dispatch import Decision, LoadedExample, RankBatch, assemble
from motet.dispatch.cut_batch import examples_to_lay_out
from motet.dropout import example_keys
from motet.models.mllm import MLLM
from motet.runtime.fsdp import FSDPConfig, shard
from motet.runtime.mesh import Mesh, build_mesh
from motet.runtime.step import TrainStep
from parity.collectives import counted_collectives, on_all_ranks
from parity.cut_at_random import cut_at_random, cut_items_at_random
from parity.planned import rank_device, share_off
from parity.planned_parts import WholeMerge
from parity.test_gradients import Case, counted_exchanges, lengths_of, local, orchestrator_of, relative, whole
from parity.tiny import DIM, PHASES, build_model, draw_examples, reference_step
from parity.towers import (
    JOINED,
    NUM_KEYS,
    RASTERS,
    READ,
    SOUNDS,
    STACKED,
    TOWERS,
    WIDE,
    phase_of,
    tower_module,
    with_patches,
)


@dataclass(frozen=True)
class Cut:
    """degrees: of the first examples, one after the other; None: drawn. method: as in a recipe, in place of these.

    num_ranks: of the job, as far as a case is drawn.
    idle: ranks that get no row. dropout: of attention, and of the rows that go in. enters_again: rows of images enter
    the backbone a second time.
    merges: a merge of the user's own takes sequences whole.
    together: "images", whose rows see each other in both directions, and "prefix", rows before the first target.
    tower: a family of encoders, of images or sound, in place of the toy's, which drop out too. items: degrees of its
    first items; None: whole or, with `draws_items`, drawn.
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
    merges: bool = False
    together: tuple[str, ...] = ()
    num_ranks: int = 4
    schedule: ClassVar[str] = "data_parallel"
    is_mixed: ClassVar[bool] = False


@cache
def mesh_of(shard_size: int | None) -> Mesh:
    return build_mesh(rank_device(), shard_size=shard_size)


def errors_of_cut(cut: Cut, cuts_something: bool = False) -> dict[str, float]:
    """How far loss, norm and gradients of a step are from one process, as shares of it, on rank 0; nothing on others.

    A collective. Fails where the bytes that the step counts are not those that collectives were given.

    cuts_something: fails, too, where ranks share no item, or not in the degrees of the case.
    """
    case, mesh = cut.case, mesh_of(cut.case.fsdp.shard_size)
    examples, model = _examples_of(cut), model_of(cut).to(mesh.device)
    keys = example_keys(7, 1, np.arange(len(examples))) if cut.dropout else None
    shard(model, mesh, case.fsdp)
    steps = list(decided(cut, model, mesh))
    if cuts_something:
        decisions = [decision for decision, _, _ in steps]
        assert any(decision.shares_items for decision in decisions), f"{cut}: nothing is cut"
        for degrees, phase in ((cut.degrees, "backbone"), (cut.items, phase_of(cut.tower))):
            if degrees:
                assert set(degrees) - {1} <= set(decisions[0].cuts_of(phase).degrees.values()), cut
    step = TrainStep(model, mesh, once_a_step=case.fsdp.once_a_step)
    loaded = (assembled(decision, lengths, of, mesh) for decision, lengths, of in steps)
    batches = [step.prepared(batch, torch.float64).to(mesh.device) for batch in loaded]
    if keys is not None:
        parts = np.array_split(np.arange(len(examples)), case.num_microbatches)
        batches = [batch.with_draws(keys[part]) for batch, part in zip(batches, parts, strict=True)]
    with counted_exchanges() as exchanges, counted_collectives() as collectives:
        result = step.run(batches)
    collectives["exchange"] += sum(size_bytes for _, size_bytes in exchanges)
    sent_bytes = on_all_ranks(collectives)
    assert result.sent_bytes == pytest.approx(sent_bytes, abs=0.5), (result.sent_bytes, sent_bytes)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    found = whole(
        {name: None if gradient is None else local(gradient).cpu() for name, gradient in gradients.items()}, mesh
    )
    if mesh.rank:
        return {}
    reference = model_of(cut)
    loss = reference_step(reference, examples, keys=keys)
    expected = {name: p.grad for name, p in reference.named_parameters()}
    norm = sum(float(g.square().sum()) for g in expected.values() if g is not None) ** 0.5
    errors = {"loss": share_off(result.loss, loss), "gradient norm": share_off(result.grad_norm, norm)}
    for name, gradient in expected.items():
        if (gradient is None) != (found[name] is None):
            errors[f"gradient of {name} ({found[name] is None} instead of {gradient is None}: none)"] = math.inf
        elif gradient is not None:
            errors[f"gradient of {name}"] = relative(found[name], gradient)
    return errors


def model_of(cut: Cut) -> MLLM:
    readers = "sum" if cut.enters_again else cut.case.readers
    stacked, keys = STACKED.get(cut.tower, 0), NUM_KEYS if cut.tower in WIDE else 0
    family = cut.tower if keys else cut.case.family
    model = build_model(torch.float64, cut.case.frozen, readers, family, stacked, keys)
    model.backbone.bidirectional = ("image",) if "images" in cut.together else ()
    model.backbone.prefix = "prefix" in cut.together
    if cut.tower:
        dropout = 0.2 if cut.dropout else 0.0
        model.encoders[phase_of(cut.tower)] = tower_module(cut.tower, cut.case.frozen, dropout)
    if cut.merges:
        merge = WholeMerge(DIM, 0.2 if cut.dropout else 0.0).to(torch.float64)
        model.backbone.merge = merge.requires_grad_("backbone" not in cut.case.frozen)
    if cut.dropout:
        for layer in model.backbone.causal_lm.model.layers:
            if hasattr(layer, "cross_attn"):
                layer.cross_attn.dropout = 0.3
            else:
                layer.self_attn.attention_dropout = 0.3
    return model


def _examples_of(cut: Cut) -> list[LoadedExample]:
    case = cut.case
    drawn = draw_examples(case.num_examples, case.seed, case.contents, "sum" if cut.enters_again else case.readers)
    return [with_patches(example, case.seed, cut.tower) for example in drawn] if cut.tower else drawn


def decided(cut: Cut, model: MLLM, mesh: Mesh) -> Iterator[tuple[Decision, BatchLengths, list[LoadedExample]]]:
    """By microbatch: what is decided, lengths, examples."""
    examples, case = _examples_of(cut), replace(cut.case, method=cut.method) if cut.method else cut.case
    orchestrator = orchestrator_of(model, mesh.num_ranks, case)
    for number, part in enumerate(np.array_split(np.arange(len(examples)), cut.case.num_microbatches)):
        chosen = [examples[i] for i in part]
        lengths = replace(lengths_of(model, chosen, mesh), home=home_ranks(len(chosen), mesh.num_ranks))
        decision = orchestrator.decide(lengths)
        if not cut.method:
            rng = np.random.default_rng((case.seed, number))
            if cut.degrees != ():
                decision = cut_at_random(decision, lengths, rng, cut.degrees, cut.idle)
            if cut.items is not None or cut.draws_items:
                phase = phase_of(cut.tower)
                module = model.encoders[phase].spec_module(phase)
                decision = cut_items_at_random(decision, lengths, module, rng, cut.items, cut.idle)
        decision = replace(decision, merges=cut.merges, sight=model.backbone.sight)
        yield decision, lengths, chosen


def assembled(decision: Decision, lengths: BatchLengths, examples: list[LoadedExample], mesh: Mesh) -> RankBatch:
    items = {p: [m for e in examples for q, m in zip(e.sequence.media, e.media) if q == p] for p in lengths.items}
    return assemble(
        decision,
        lengths,
        mesh.rank,
        [examples[i].sequence for i in decision.sequences_on(mesh.rank)],
        {p: [items[p][i] for i in decision.items_on(p, mesh.rank)] for p in lengths.items},
        shared={int(i): examples[i].sequence for i in examples_to_lay_out(decision.cuts, lengths)},
    )


_FSDP = (
    *(FSDPConfig(), FSDPConfig(shard_size=1), FSDPConfig(recompute=True, reshard_after_forward=False)),
    *(FSDPConfig(shard_size=1, recompute={"backbone": 1}), FSDPConfig(shard_size=2)),
)
_FROZEN = ((), (), ("image",), ("image encoder",), ("audio", "backbone"), ("backbone",), ("image encoder", "audio"))


def drawn_cut(seed: int, number: int) -> Cut:
    """The same case for the same numbers: sequences and images in any degrees, beside whole ones."""
    rng = np.random.default_rng((seed, number))
    num_ranks = int(rng.choice([2, 3, 4, 5], p=[0.3, 0.3, 0.25, 0.15]))
    fsdp = [each for each in _FSDP if num_ranks % (each.shard_size or 1) == 0]
    num_examples = int(rng.integers(1, 15))
    case = Case(
        method="per_phase",
        seed=int(rng.integers(2**31)),
        num_examples=num_examples,
        num_microbatches=int(rng.integers(1, min(num_examples, 3) + 1)),
        fsdp=fsdp[rng.integers(len(fsdp))],
        frozen=_FROZEN[rng.integers(len(_FROZEN))],
        contents=tuple(name for name in PHASES if rng.random() < 0.8),
        family=str(rng.choice(["qwen2", "qwen2", "llama", "qwen3", "mixtral", "qwen3_moe"])),
    )
    tower = str(rng.choice(["", "", *TOWERS, *JOINED, *RASTERS, *SOUNDS, *READ, *WIDE]))
    return Cut(
        case,
        degrees=() if tower and rng.random() < 0.2 else None,
        method="split" if rng.random() < 0.15 else "",
        idle=int(rng.integers(num_ranks - 1)) if rng.random() < 0.4 else 0,
        dropout=bool(rng.random() < 0.3),
        enters_again=not tower and bool(rng.random() < 0.5),
        tower=tower,
        draws_items=bool(tower),
        num_ranks=num_ranks,
        together=tuple(name for name in ("images", "prefix") if rng.random() < 0.2),
        merges=bool(rng.random() < 0.2),
    )


def smaller_cuts(cut: Cut) -> Iterator[Cut]:
    """Cases with one thing less, in one order."""
    case, plain = cut.case, Case()
    changes: list[Cut] = [
        *(replace(cut, case=replace(case, num_microbatches=count)) for count in range(1, case.num_microbatches)),
        *(
            replace(cut, case=replace(case, num_examples=count))
            for count in (case.num_examples // 2, case.num_examples - 1)
            if count >= case.num_microbatches
        ),
        *(
            replace(cut, case=replace(case, contents=tuple(name for name in case.contents if name != left)))
            for left in case.contents
        ),
        *(replace(cut, case=replace(case, **{name: getattr(plain, name)})) for name in ("fsdp", "frozen", "family")),
        *(replace(cut, **{name: False}) for name in ("dropout", "enters_again", "draws_items", "merges")),
        replace(cut, idle=0),
        replace(cut, together=()),
        replace(cut, degrees=()),
        replace(cut, tower="", draws_items=False),
    ]
    yield from (one for one in changes if one != cut)
