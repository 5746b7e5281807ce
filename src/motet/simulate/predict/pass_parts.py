"""The parts of the passes of stages: which share of a pass each takes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE
from motet.cost.flops import HalfShares, attention_shares
from motet.cost.memory import StageLayer
from motet.schedule import PlannedStage, parts_of, pieces_of
from motet.schedule.layout import BLOCK_SUMS, LAYER_PARTS
from motet.simulate.engine.stage_times import Part

if TYPE_CHECKING:
    from motet.simulate.predict.stage_pricing import Pricing


def parts_of_pass(pricing: Pricing, stage: PlannedStage, backward: bool) -> tuple[Part, ...]:
    """The parts of a stage's pass, in execution order.

    A part is a group of blocks in data parallelism, and of blocks or halves of blocks of encoders in bubbles; it
    is a half of a layer, or communication, in a backbone whose passes are filled (`halves_of_layers`), and in encoders
    whose sums are apart. In backward, a part takes no time if it is frozen and passes no gradient on. Finer parts of
    encoders, which training refuses, are equal.
    """
    if stage.has_halves:
        return halves_of_layers(stage.num_layers, share_beside(pricing, stage, backward))
    if stage.has_sums:
        return _parts_with_sums(pricing, stage, backward)
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

    Of each half of a layer of the backbone it is one collective of two, and of an encoder whose sums are apart the sum.
    All the rest is waited for: exchanges of context-parallel ranks and with those of experts, sums of projectors, and
    in backward also what is computed again.
    """
    total_s = beside_s = 0.0
    for placed, count in Counter(pricing.layers(stage)).items():
        all_s, sums_s = _tensor_s(pricing, stage, placed, backward)
        total_s += count * all_s
        beside_s += count * sums_s * (stage.has_sums or placed.module == BACKBONE)
    return beside_s / total_s if total_s else 0.0


def _tensor_s(pricing: Pricing, stage: PlannedStage, placed: StageLayer, backward: bool) -> tuple[float, float]:
    """Seconds of a layer's communication in its pass, and of it of the sums of its halves."""
    passes = pricing.layer_pricing.of_passes(placed, stage.unit.tp)
    name = "backward_tensor" if backward else "forward_tensor"
    if name not in passes:
        return 0.0, 0.0
    beside_s = pricing.layer_pricing.price(placed.module, placed.layer).beside_s
    return float(passes[name].sum()), float(beside_s.sum()) if placed.layer.attention is not None else 0.0


def _parts_with_sums(pricing: Pricing, stage: PlannedStage, backward: bool) -> tuple[Part, ...]:
    """The parts of an encoder whose sums are apart (`layout.parts_with_sums`): shares of compute, and of sums."""
    parts = parts_of(stage, pricing.plan.model)
    computed_s, sums_s, current_s = list[float](), list[float](), 0.0
    for part in reversed(parts) if backward else parts:
        (name,) = part.modules
        module, block, layers = pricing.plan.model.module(name), part.layers[name][0], pricing.layers(part)
        halved = module.halved_layer(block) - module.blocks[block].start
        before_s, behind_s = (
            sum(pricing.pass_s(stage, Counter(some), backward)) for some in (layers[:halved], layers[halved + 1 :])
        )
        *halves_s, again_s = _halves_s(pricing, stage, layers[halved], backward)
        if backward:
            before_s, behind_s = behind_s, before_s
            halves_s.reverse()
        # A block computes again what it has not kept before its backward pass begins.
        computed_s += [current_s + before_s + again_s + halves_s[0], halves_s[1]]
        sums_s += BLOCK_SUMS * [_tensor_s(pricing, stage, layers[halved], backward)[1] / BLOCK_SUMS]
        current_s = behind_s
    computed_s.append(current_s)
    total_s, beside = sum(computed_s), share_beside(pricing, stage, backward)
    shares = [second / total_s if total_s else 1 / len(computed_s) for second in computed_s]
    of_sums = [beside * second / (sum(sums_s) or 1.0) for second in sums_s]
    pairs = [(Part(share), Part(of_sum, "tensor")) for share, of_sum in zip(shares, of_sums)]
    return (*(part for pair in pairs for part in pair), Part(shares[-1]))


def _halves_s(pricing: Pricing, stage: PlannedStage, placed: StageLayer, backward: bool) -> tuple[float, float, float]:
    """Seconds of a layer's attention, of its MLP, and of what backward computes again before."""
    attention_s, passes_s = _attention_s(pricing, stage, placed, backward), pricing.pass_s(stage, {placed: 1}, backward)
    again_s = passes_s[-1] if backward else 0.0
    if again_s:
        attention_s -= again_s * _attention_shares(pricing, placed).forward
    return attention_s, sum(passes_s) - again_s - attention_s, again_s


def is_finer(stage: PlannedStage, model: ModelSpec) -> bool:
    """Whether the passes of a stage are in parts that training does not run."""
    return not stage.has_sums and stage.num_parts > len(pieces_of(stage, model))


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
    shares = _attention_shares(pricing, placed)
    of_passes = (shares.input, shares.weight, shares.forward) if backward else (shares.forward,)
    return sum(share * s for share, s in zip(of_passes, pricing.pass_s(stage, {placed: 1}, backward), strict=True))


def _attention_shares(pricing: Pricing, placed: StageLayer) -> HalfShares:
    return attention_shares(placed.layer, pricing.layer_pricing.price(placed.module, placed.layer).work)
