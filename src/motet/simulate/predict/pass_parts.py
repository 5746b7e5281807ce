"""The parts of the passes of stages: which share of a pass each takes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE
from motet.cost.flops import attention_shares
from motet.cost.memory import StageLayer
from motet.schedule import PlannedStage, parts_of, pieces_of
from motet.schedule.layout import LAYER_PARTS
from motet.simulate.engine.stage_times import Part

if TYPE_CHECKING:
    from motet.simulate.predict.stage_pricing import Pricing


def parts_of_pass(pricing: Pricing, stage: PlannedStage, backward: bool) -> tuple[Part, ...]:
    """The parts of a stage's pass, in execution order.

    A part is a group of blocks in data parallelism, and of blocks or halves of blocks of encoders in bubbles; it
    is a half of a layer, or communication, in a backbone whose passes are filled (`halves_of_layers`). In backward, a
    part takes no time if it is frozen and passes no gradient on. Finer parts of encoders, which training refuses, are
    equal.
    """
    if stage.has_halves:
        return halves_of_layers(stage.num_layers, share_beside(pricing, stage, backward))
    if is_finer(stage, pricing.plan.model):
        return (Part(1 / stage.num_parts),) * stage.num_parts
    seconds = [_part_s(pricing, stage, part, backward) for part in parts_of(stage, pricing.plan.model)]
    shares = [second / sum(seconds) if sum(seconds) else 1 / len(seconds) for second in seconds]
    return tuple(Part(share) for share in (reversed(shares) if backward else shares))


def halves_of_layers(num_layers: int, beside: float) -> tuple[Part, ...]:
    """The parts of layers whose halves are alike (`LAYER_PARTS`). beside: as of `share_beside`."""
    num_halves = LAYER_PARTS // 2 * num_layers
    return (Part(beside / num_halves, "tensor"), Part(1 / num_halves)) * num_halves


def share_beside(pricing: Pricing, stage: PlannedStage, backward: bool) -> float:
    """The share of a pass's communication that other work can run beside (`runtime/parted_pass.py`).

    Of each half of a layer of the backbone it is one collective of two. All the rest is waited for: exchanges of
    context-parallel ranks and with those of experts, and in backward also what is computed again.
    """
    total_s = beside_s = 0.0
    for placed, count in Counter(pricing.layers(stage)).items():
        name = "backward_tensor" if backward else "forward_tensor"
        passes = pricing.layer_pricing.of_passes(placed, stage.unit.tp)
        if name in passes:
            total_s += count * float(passes[name].sum())
            if placed.module == BACKBONE and placed.layer.attention is not None:
                beside_s += count * float(pricing.layer_pricing.price(BACKBONE, placed.layer).beside_s.sum())
    return beside_s / total_s if total_s else 0.0


def is_finer(stage: PlannedStage, model: ModelSpec) -> bool:
    """Whether the passes of a stage are in parts that are finer than halves of blocks."""
    return stage.num_parts > len(pieces_of(stage, model))


def _part_s(pricing: Pricing, stage: PlannedStage, part: PlannedStage, backward: bool) -> float:
    """Seconds of a part of a stage's pass, over all microbatches and replicas.

    The halves of a layer divide what it takes by their operations: profiles time whole layers.
    """
    layers = pricing.layers(part)
    first, last = (pricing.plan.model.module(part.modules[end]) for end in (0, -1))
    begin, stop = part.layers[part.modules[0]][0], part.layers[part.modules[-1]][1] - 1
    num_before = first.halved_layer(begin) - first.blocks[begin].start if part.begins_inside else 0
    num_behind = last.blocks[stop].stop - 1 - last.halved_layer(stop) if part.ends_inside else 0
    layers = layers[num_before : len(layers) - num_behind]
    total_s = sum(pricing.pass_s(stage, Counter(layers), backward))
    if part.begins_inside:
        total_s -= _attention_s(pricing, stage, layers[0], backward)
    if part.ends_inside:
        total_s -= sum(pricing.pass_s(stage, {layers[-1]: 1}, backward))
        total_s += _attention_s(pricing, stage, layers[-1], backward)
    return max(total_s, 0.0)


def _attention_s(pricing: Pricing, stage: PlannedStage, placed: StageLayer, backward: bool) -> float:
    """What the attention of a layer takes of its pass."""
    shares = attention_shares(placed.layer, pricing.layer_pricing.price(placed.module, placed.layer).work)
    of_passes = (shares.input, shares.weight, shares.forward) if backward else (shares.forward,)
    return sum(share * s for share, s in zip(of_passes, pricing.pass_s(stage, {placed: 1}, backward), strict=True))
