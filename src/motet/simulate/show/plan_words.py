"""A Plan in words, for people who have to approve it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from motet.core.plan import Plan, Unit
from motet.core.spec import ModelSpec
from motet.core.words import counted_words
from motet.core.workload import BACKBONE
from motet.schedule.layout import Layout
from motet.schedule.plan_units import cuts_over_replicas, cuts_sequences, joins_all_replicas

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "interleaved 1F1B",
    "zb_h1": "zero-bubble (ZB-H1)",
    "zb_v": "zero-bubble (ZB-V)",
    "data_parallel": "data parallel, without a pipeline",
}

_BALANCES = {
    "joint": "one assignment of examples for all modules",
    "per_phase": "an assignment of items for each module",
    "auto": "one assignment for all modules or one for each, whichever makes the step faster",
    "split": "one assignment for all modules or one for each, with long items cut over ranks where that is faster",
}
_POLICIES = {
    "packed": "packed",
    "padded": "padded to the longest",
    "padded_attention": "padded in attention alone",
}


def plan_in_words(plan: Plan) -> list[str]:
    """Sentences: the model and the cluster, the step, then each unit. The Plan must fit (`schedule/check/fit.py`)."""
    cluster, backbone = plan.cluster, plan.unit_of(BACKBONE)
    num_microbatches = plan.batch_size // (plan.microbatch_size * backbone.dp)
    frozen = [module.name for module in plan.model.modules if not module.trainable]
    first = (
        f"{plan.model.name}, {_count(plan.model.num_parameters)} parameters{_learning(plan.model)}"
        f"{f' ({_listed(frozen)} frozen)' if frozen else ''}, on {_number(cluster.num_nodes, 'node')} of "
        f"{cluster.ranks_per_node} {cluster.device.name}, in {plan.precision}.{_idle(plan)}"
    )
    schedule = _SCHEDULES[plan.schedule]
    if plan.deferred_warmup:
        schedule += " with deferred warm-up"
    microbatches = _number(num_microbatches, "microbatch", "microbatches")
    replicas = "the backbone" if backbone.dp == 1 else f"each of {backbone.dp:,} replicas of the backbone"
    step = (
        f"A step is {_number(plan.batch_size, 'example')}: {microbatches} of "
        f"{_number(plan.microbatch_size, 'example')} on {replicas}; {schedule}."
    )
    if plan.balance != "off" and plan.schedule != "data_parallel":
        if plan.order == "given":
            step += " Whole microbatches are balanced over the backbone's replicas"
            step += ", and items of encoders over theirs." if joins_all_replicas(plan) else "."
        if cuts_sequences(plan):
            step += " Sequences that are too long for one replica are cut over several."
        if joins_all_replicas(plan) and plan.balance == "split":
            names = [module.name for module in plan.model.modules if cuts_over_replicas(plan, module.name)]
            step += f" So are items of {_listed(names)}, over replicas of their units."
    elif plan.balance != "off":
        step += f" Items are balanced over ranks: {_BALANCES[plan.balance]}."
    if plan.balance != "off":
        step += "".join(f" Those of {name} are balanced as if {_POLICIES[how]}." for name, how in plan.policy.items())
    elif plan.schedule == "data_parallel" and backbone.dp > 1:
        step += " Items are not balanced."
    if plan.microbatch_caps:
        caps = _listed([f"{cap:,} of {name}" for name, cap in plan.microbatch_caps.items()])
        step += f" That is the mean: a microbatch is a group of examples whose lengths sum up to at most {caps}."
        step += " Where a sequence is cut, replicas share the groups beside it." if plan.balance == "split" else ""
    step += _order(plan, num_microbatches, backbone.dp)
    if plan.fills:
        step += f" Encoders run beside the backbone, in {_number(len(plan.fills), 'slice')} placed among its passes."
    if plan.filling == "by_step":
        step += " Each step decides by its lengths which encoder pipeline takes which microbatch, and where."
    return [first, step, *(_unit(unit, plan) for unit in plan.units)]


def _order(plan: Plan, num_microbatches: int, num_replicas: int) -> str:
    """` Examples are dealt out in every step so that replicas are even.`; "" if there is nothing to choose."""
    even, done = [], []
    if num_microbatches > 1 and (plan.microbatch_size > 1 or plan.microbatch_caps):
        even.append("microbatches")
    if num_replicas > 1:
        even.append("replicas")
    if plan.order in ("intra", "both") and even:
        done.append(f"examples are dealt out in every step so that {' and '.join(even)} are even")
    if plan.order in ("inter", "both") and num_microbatches > 1:
        done.append("microbatches are taken in the order that leaves the shortest bubbles")
    sentence = ", and ".join(done)
    return f" {sentence[0].upper()}{sentence[1:]}." if sentence else ""


def _learning(model: ModelSpec) -> str:
    """`, of which 36.6 M learn`; "" if all do."""
    num_learning = sum(module.num_updated_parameters for module in model.modules)
    return f", of which {_count(num_learning)} learn" if num_learning < model.num_parameters else ""


def _idle(plan: Plan) -> str:
    """` 16 of its 1,296 ranks are idle.`; "" if the units use all ranks of the cluster."""
    num_ranks = plan.cluster.num_ranks
    if not (num_idle := num_ranks - len(plan.ranks)):
        return ""
    return f" {num_idle:,} of its {num_ranks:,} ranks {'is' if num_idle == 1 else 'are'} idle."


def rows_in_words(plan: Plan) -> str:
    """A sentence for a picture of a Plan's step: the unit of each row, and the number of islands that it stands for.

    "" if there is one island and one unit with ranks of its own. The Plan must fit its model.
    """
    layout = Layout(plan)
    units = layout.units if len(layout.units) > 1 else ()
    if layout.num_islands == 1 and not units:
        return ""
    alike = f", of the slowest of {layout.num_islands:,} parts that work alike" if layout.num_islands > 1 else ""
    of = [
        f"{unit.name} in {unit.first_rank:,}" + (f" to {unit.first_rank + unit.num_ranks - 1:,}" * (unit.num_ranks > 1))
        for unit in units
    ]
    return f"Rows are ranks of the cluster{alike}{': ' if of else ''}{'; '.join(of)}."


def _unit(unit: Unit, plan: Plan) -> str:
    ranks = f"ranks {unit.first_rank} to {unit.first_rank + unit.num_ranks - 1}"
    if unit.num_ranks == 1:
        ranks = f"rank {unit.first_rank}"
    sizes = {"data": unit.dp, "pipeline": unit.pp, "tensor": unit.tp, "context": unit.cp}
    ways = " x ".join(f"{size} {name}" for name, size in sizes.items() if size > 1)
    ways += f", experts over {unit.ep} of them" if unit.ep > 1 else ""
    zero = f", ZeRO-{unit.zero}" if unit.dp > 1 and unit.zero else ""
    if zero and unit.shard_size:
        zero += f" over {counted_words(unit.shard_size, 'rank')}"
    words = f"{unit.name}: {ranks}{f' = {ways}' if ways else ''}{zero}. {_stages(unit)}."
    if unit.replicated:
        words += f" Every stage also computes {_listed(list(unit.replicated))}."
    return words


def _stages(unit: Unit) -> str:
    """`4 stages, in layers: image 10; 3 x backbone 8 (2 recomputed)`: equal stages in a row are one entry."""
    recompute = unit.recompute or ({},) * len(unit.stages)
    texts = [_stage(stage, recomputed) for stage, recomputed in zip(unit.stages, recompute)]
    runs = [(len(list(run)), text) for text, run in groupby(texts)]
    parts = "; ".join(f"{count} x {text}" if count > 1 else text for count, text in runs)
    return f"{'Layers' if len(texts) == 1 else f'{len(texts)} stages, in layers'}: {parts}"


def _stage(stage: Mapping[str, int], recompute: Mapping[str, int]) -> str:
    def one(module: str, count: int) -> str:
        recomputed = recompute.get(module, 0)
        note = f" ({'all' if recomputed == count else recomputed} recomputed)" if recomputed else ""
        return f"{module} {count}{note}"

    return " + ".join(one(module, count) for module, count in stage.items())


def _number(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def _count(number: int) -> str:
    scale, unit = next(
        ((scale, unit) for scale, unit in ((1e9, " B"), (1e6, " M"), (1e3, " K")) if number >= scale), (1.0, "")
    )
    return f"{number / scale:.3g}{unit}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
