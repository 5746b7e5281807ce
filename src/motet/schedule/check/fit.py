"""Whether a Plan fits its model and its cluster: every layer is held once, every rank exists, every count divides.

An error is one sentence: it names the unit, module or key, and says what would be right.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import gcd

from motet.core.errors import UserError
from motet.core.limits import check_size
from motet.core.plan import ORDERED_BALANCES, Plan, Unit
from motet.core.spec import Module
from motet.core.words import counted_words
from motet.core.workload import BACKBONE
from motet.schedule.plan_units import (
    backbone_unit,
    joins_all_replicas,
    num_islands,
    pipelined_units,
    replicas_in_step,
    units_in_bubbles,
)

MAX_MICROBATCHES = 100_000
"""Most microbatches of a replica in a step. Real steps take up to thousands; a mistyped batch size takes the host's
memory."""
_CHUNKS = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "zb_v": 2, "data_parallel": 1}
"""Stages on each pipeline rank of the backbone, by schedule. "interleaved_1f1b" takes any number from 2."""


def check_fit(plan: Plan) -> None:
    """Refuse a Plan that does not fit: raises UserError for the first thing that is wrong. O(layers + units^2)."""
    _check_units(plan)
    _check_layers(plan)
    _check_heads(plan)
    _check_experts(plan)
    _check_order(plan)
    _check_ranks(plan)
    _check_batch(plan)
    _check_schedule(plan)
    _check_examples(plan)
    _check_policy(plan)


def _check_units(plan: Plan) -> None:
    names = Counter(unit.name for unit in plan.units)
    for name, count in names.items():
        if count > 1:
            raise UserError(f"{count} units are named {name!r}; each must have its own name.")
    for unit in plan.units:
        sizes = {"dp": unit.dp, "pp": unit.pp, "tp": unit.tp, "cp": unit.cp, "ep": unit.ep}
        for key, size in sizes.items():
            if size < 1:
                raise UserError(f"unit {unit.name!r}: {key} is {size}; it must be at least 1.")
        if unit.shard_size < 0 or (unit.shard_size and unit.dp % unit.shard_size):
            raise UserError(
                f"unit {unit.name!r}: shard_size is {unit.shard_size}; it must divide dp, {unit.dp}, or be 0."
            )
        _check_stages(unit)
        _check_recompute(unit)


def _check_stages(unit: Unit) -> None:
    if not unit.stages:
        raise UserError(f"unit {unit.name!r} has no stages; it needs at least one.")
    for number, stage in enumerate(unit.stages):
        if not stage:
            raise UserError(f"stage {number} of unit {unit.name!r} has no layers; give it some or remove it.")
        for module, count in stage.items():
            if count < 1:
                raise UserError(
                    f"stage {number} of unit {unit.name!r} assigns {count} layers to {module!r}; use at least 1 or "
                    "remove it."
                )


def _check_recompute(unit: Unit) -> None:
    if unit.recompute and len(unit.recompute) != len(unit.stages):
        raise UserError(
            f"unit {unit.name!r}: recompute is given for {counted_words(len(unit.recompute), 'stage')} of "
            f"{len(unit.stages)}; give it for all or none."
        )
    for number, (recompute, stage) in enumerate(zip(unit.recompute, unit.stages)):
        for module, count in recompute.items():
            if not 0 <= count <= stage.get(module, 0):
                raise UserError(
                    f"unit {unit.name!r}: stage {number} recomputes {counted_words(count, 'layer')} of {module!r}; it "
                    f"has {stage.get(module, 0)}."
                )


def _check_layers(plan: Plan) -> None:
    held = Counter[str]()
    for unit in plan.units:
        for stage in unit.stages:
            held.update(stage)
    for name in [*held, *(name for unit in plan.units for name in unit.replicated)]:
        if name not in {module.name for module in plan.model.modules}:
            names = ", ".join(module.name for module in plan.model.modules)
            raise UserError(f"the plan has module {name!r}, but {plan.model.name} does not; it has {names}.")
    for module in plan.model.modules:
        units = [unit.name for unit in plan.units if module.name in unit.modules]
        if len(units) > 1:
            raise UserError(f"module {module.name!r} is in units {', '.join(units)}; one unit must hold all of it.")
        replicated = any(module.name in unit.replicated for unit in plan.units)
        count = held[module.name]
        if replicated and count:
            raise UserError(f"module {module.name!r} is replicated and also in stages; it must be one or the other.")
        if not replicated and count != len(module.blocks):
            raise UserError(
                f"module {module.name!r} has {counted_words(len(module.blocks), 'layer')}; the plan's stages hold "
                f"{count}."
            )
    if BACKBONE not in held:
        raise UserError(f"no unit holds a module named {BACKBONE!r}; a plan needs one.")
    for unit in plan.units:
        if unit.replicated and unit is not backbone_unit(plan):
            raise UserError(f"unit {unit.name!r} replicates modules; only the backbone's unit may.")


def _check_heads(plan: Plan) -> None:
    """Tensor-parallel ranks have whole heads and experts, and as many each."""
    for unit in plan.units:
        for name in unit.modules if unit.tp > 1 else ():
            if what := undivided_parts(plan.model.module(name), unit.tp):
                raise UserError(f"unit {unit.name!r}: tp is {unit.tp}, and {name!r} has {what}; tp must divide them.")


def _check_experts(plan: Plan) -> None:
    """Expert-parallel ranks have whole experts, as many each, and run the same passes in the same order."""
    for unit in plan.units:
        if unit.ep == 1:
            continue
        where = f"unit {unit.name!r}: ep is {unit.ep}"
        layers = [stack.layer for name in unit.modules for stack in plan.model.module(name).stacks]
        numbers = sorted({layer.num_experts for layer in layers if layer.num_experts})
        if not numbers:
            raise UserError(f"{where}, and {', '.join(unit.modules)} have no experts; it must be 1.")
        if undivided := [number for number in numbers if number % (unit.tp * unit.ep)]:
            by, what = ("", "ep") if unit.tp == 1 else (f" and tp {unit.tp}", "ep * tp")
            raise UserError(f"{where}{by}, and layers have {undivided[0]} experts; {what} must divide them.")
        if unit.dp * unit.cp % unit.ep:
            raise UserError(f"{where}; it must divide dp * cp, {unit.dp * unit.cp}, whose ranks share experts.")
        if unit.cp % unit.ep and unit.dp > num_islands(plan) and unit is not backbone_unit(plan):
            right = "dp must divide that of each other unit"
            if joins_all_replicas(plan):
                right = f"balance must not be {plan.balance!r}, which lets any replica feed any other"
            raise UserError(
                f"{where}, over replicas that other units feed in common, and it is not the backbone's; {right}, or ep "
                f"must divide cp, {unit.cp}."
            )


def undivided_parts(module: Module, tp: int) -> str:
    """Heads or experts of a module that tensor parallelism does not divide, such as "25 heads"; "": it divides all."""
    for stack in module.stacks:
        if (attention := stack.layer.attention) is not None:
            for number, of in ((attention.num_heads, ""), (attention.num_kv_heads, " of keys and values")):
                if number % tp:
                    return f"{number} {'head' if number == 1 else 'heads'}{of}"
        if stack.layer.num_experts % tp:
            return f"{stack.layer.num_experts} experts"
    return ""


def _check_order(plan: Plan) -> None:
    """Modules of a unit come in the order of the data, and the edges between units form no circle."""
    replicated = {name for unit in plan.units for name in unit.replicated}
    for source, sink in plan.model.edges:
        unit, other = plan.unit_of(source), plan.unit_of(sink)
        if sink in replicated or (source in replicated and sink != BACKBONE):
            raise UserError(f"{source!r} feeds {sink!r}; only what feeds the backbone alone can be replicated.")
        if other in units_in_bubbles(plan) or (unit in units_in_bubbles(plan) and other is not backbone_unit(plan)):
            raise UserError(
                f"{source!r} feeds {sink!r}; what runs in the backbone's bubbles may feed the backbone alone."
            )
        if unit is other and source not in replicated and _stages_of(unit, source)[-1] > _stages_of(unit, sink)[0]:
            raise UserError(f"unit {unit.name!r}: {source!r} feeds {sink!r}, so its stages must not come after.")
        for index, stage in enumerate(unit.stages if plan.schedule != "data_parallel" else ()):
            if sink in stage and source in list(stage)[list(stage).index(sink) :]:
                raise UserError(
                    f"unit {unit.name!r}: stage {index} has {sink!r} before {source!r}, which feeds it; a stage names "
                    "its modules in the order in which they run."
                )
    left = list(plan.units)
    feeds = {(plan.unit_of(source).name, plan.unit_of(sink).name) for source, sink in plan.model.edges}
    while left:
        first = [
            unit for unit in left if not any((other.name, unit.name) in feeds for other in left if other is not unit)
        ]
        if not first:
            names = ", ".join(unit.name for unit in left)
            raise UserError(
                f"units {names} feed each other in a circle; a module between two others needs its own unit."
            )
        left = [unit for unit in left if unit not in first]


def _stages_of(unit: Unit, module: str) -> list[int]:
    """The indices of a unit's stages that run layers of a module."""
    return [index for index, stage in enumerate(unit.stages) if module in stage]


def _check_ranks(plan: Plan) -> None:
    for unit in plan.units:
        last = unit.first_rank + unit.num_ranks - 1
        if unit.first_rank < 0 or last >= plan.cluster.num_ranks:
            raise UserError(
                f"unit {unit.name!r} is on ranks {unit.first_rank} to {last}; "
                f"the cluster has ranks 0 to {plan.cluster.num_ranks - 1}."
            )
    backbone = backbone_unit(plan)
    for unit in units_in_bubbles(plan):
        if unit.num_ranks != backbone.num_ranks:
            raise UserError(
                f"unit {unit.name!r} has {counted_words(unit.num_ranks, 'rank')} and shares some with the backbone, "
                f"which has {backbone.num_ranks}; it must share all or none."
            )
        if backbone.pp % unit.pp or (backbone.tp * backbone.cp) % (unit.tp * unit.cp):
            raise UserError(
                f"unit {unit.name!r} runs on the backbone's ranks, so its pp ({unit.pp}) and tp * cp "
                f"({unit.tp * unit.cp}) must divide the backbone's ({backbone.pp} and {backbone.tp * backbone.cp})."
            )
        if backbone.tp % unit.tp:
            tp = gcd(backbone.tp, unit.tp)
            raise UserError(
                f"unit {unit.name!r} runs on the backbone's ranks with tp {unit.tp}; it must divide the backbone's, "
                f"{backbone.tp}, as gradients of its rows come to the ranks that share these alone: let it have tp "
                f"{tp} and cp {unit.tp * unit.cp // tp}, by which the same ranks share its items."
            )
        together, shards = replicas_in_step(plan, unit), unit.shard_size or unit.dp
        if unit.zero > 1 and together % shards:
            right = f"set shard_size to {together}, or to what divides it, or" if together > 1 else "set"
            raise UserError(
                f"unit {unit.name!r}: zero is {unit.zero}, over {counted_words(shards, 'replica')}, and "
                f"{backbone.pp // unit.pp} pipelines in bubbles take different microbatches; {right} zero to 0 or 1."
            )
        if len(unit.stages) != unit.pp:
            raise UserError(
                f"unit {unit.name!r} runs in bubbles with {counted_words(len(unit.stages), 'stage')}; it must have pp, "
                f"{unit.pp}."
            )
    placed = sorted(pipelined_units(plan), key=lambda unit: unit.first_rank)
    for unit, other in pairwise(placed):
        if unit.first_rank + unit.num_ranks > other.first_rank:
            raise UserError(f"units {unit.name!r} and {other.name!r} share rank {other.first_rank}, but not all ranks.")


def _check_batch(plan: Plan) -> None:
    """Every replica takes whole microbatches, and every encoder pipeline gets at least one."""
    check_size(plan.batch_size, sum(unit.num_ranks for unit in pipelined_units(plan)))
    backbone = backbone_unit(plan)
    num_examples = backbone.dp * plan.microbatch_size  # of a microbatch, over all replicas of the backbone
    if plan.microbatch_size < 1 or plan.batch_size < 1 or plan.batch_size % num_examples:
        raise UserError(
            f"batch_size is {plan.batch_size}; it must be a multiple of dp * microbatch_size of the backbone, "
            f"{num_examples}."
        )
    num_microbatches = plan.batch_size // num_examples
    if num_microbatches > MAX_MICROBATCHES:
        raise UserError(
            f"batch_size is {plan.batch_size:,}, which is {num_microbatches:,} microbatches on each replica of "
            f"the backbone; there may be {MAX_MICROBATCHES:,}."
        )
    for unit in units_in_bubbles(plan):
        if num_microbatches < backbone.pp // unit.pp:
            raise UserError(
                f"unit {unit.name!r} has {backbone.pp // unit.pp} pipelines beside each of the backbone's, which takes "
                f"{counted_words(num_microbatches, 'microbatch', 'microbatches')}; each needs at least one."
            )


def _check_schedule(plan: Plan) -> None:
    kind, backbone, units = plan.schedule, backbone_unit(plan), pipelined_units(plan)
    if kind not in ("gpipe", "1f1b", "interleaved_1f1b") and len(units) > 1:
        raise UserError(
            f"schedule {kind!r} is of one pipeline; units that feed each other need 'gpipe', '1f1b' or "
            "'interleaved_1f1b', in which the backbone's ranks have several stages."
        )
    for unit in units:
        num_chunks, left = divmod(len(unit.stages), unit.pp)
        needed = _CHUNKS.get(kind) if unit is backbone else 1
        if left or (needed and num_chunks != needed) or (needed is None and num_chunks < 2):
            right = f"{needed} a pipeline rank" if needed else "2 or more a pipeline rank, equally many on each"
            raise UserError(
                f"unit {unit.name!r} has {counted_words(len(unit.stages), 'stage')} on {unit.pp} pipeline ranks; "
                f"{kind!r} needs {right}."
            )
    if backbone.replicated and len(backbone.stages) > backbone.pp:
        raise UserError(
            f"unit {backbone.name!r} replicates {', '.join(backbone.replicated)} beside {len(backbone.stages)} stages "
            f"on {backbone.pp} pipeline ranks; there must be one stage on each, or a rank would compute it twice."
        )
    if plan.deferred_warmup and kind != "interleaved_1f1b":
        raise UserError(f"deferred_warmup is of 'interleaved_1f1b'; the schedule is {kind!r}.")
    if plan.fills and not units_in_bubbles(plan):
        raise UserError("there are fills, but no unit shares the backbone's ranks; fills place the work of such units.")
    if plan.filling == "by_step":
        _check_filling(plan)
    if plan.balance == "split":
        _check_split(plan)
    if kind == "data_parallel":
        _check_data_parallel(plan, backbone)
    elif plan.balance not in ORDERED_BALANCES and plan.order != "given":
        raise UserError(
            f"balance {plan.balance!r} and order {plan.order!r} both deal out the microbatches of a pipeline; set one "
            "(balance 'split' may stand beside an order)."
        )


def _check_split(plan: Plan) -> None:
    """There are replicas that can share sequences, and whose passes can be cut."""
    unit = backbone_unit(plan)
    cuts = "balance is 'split', which cuts sequences over replicas of the backbone"
    if plan.schedule == "data_parallel":
        if plan.microbatch_caps:
            raise UserError(
                f"{cuts}, and under 'data_parallel' caps make each microbatch of a rank a group of whole examples; "
                "leave microbatch_caps out, or balance by 'auto'."
            )
        if plan.policy.get(BACKBONE, "packed") != "packed":
            raise UserError(f"{cuts}: they are packed, and policy of the backbone is {plan.policy[BACKBONE]!r}.")
        if made := plan.model.generators:
            raise UserError(
                f"{cuts}, and under 'data_parallel' {made[0]!r} reads query tokens of whole sequences; balance by "
                "'auto', or plan stages."
            )
    if unit.dp == 1 and len(pipelined_units(plan)) == 1:
        raise UserError(f"{cuts}, and unit {unit.name!r} has one; dp must be 2 or more.")
    if unit.dp == 1 and not joins_all_replicas(plan):
        raise UserError(
            f"{cuts}, and items over those of encoders on ranks of their own; unit {unit.name!r} has one replica, and "
            "no encoder's unit has several that can share items; dp of one must be 2 or more."
        )


def _check_filling(plan: Plan) -> None:
    """Bubbles can be filled anew in each step."""
    if not units_in_bubbles(plan):
        raise UserError("filling is 'by_step', but no unit shares the backbone's ranks, so that nothing fills bubbles.")
    if parts := [fill.before for fill in plan.fills if "." in fill.before]:
        raise UserError(
            f"filling is 'by_step', and a fill runs before {parts[0]}, a part of the backbone's pass; such fills are "
            "of every step: filling must be 'static'."
        )


def _check_examples(plan: Plan) -> None:
    """`order` and `microbatch_caps` can be applied to the examples of a step."""
    caps = plan.microbatch_caps
    if plan.schedule == "data_parallel" and plan.order != "given":
        raise UserError("order is of pipelines; under 'data_parallel' balance deals examples out.")
    if not caps:
        return
    names = [module.name for module in plan.model.modules]
    if plan.schedule == "data_parallel" and set(caps) != set(names):
        raise UserError(
            f"microbatch_caps are of {', '.join(caps)}; under 'data_parallel' each module of {plan.model.name} must "
            f"have one: {', '.join(names)}."
        )
    if plan.schedule != "data_parallel" and (BACKBONE not in caps or len(caps) != 2 or not set(caps) <= set(names)):
        raise UserError(
            f"microbatch_caps are of {', '.join(caps)}; they must be of {BACKBONE!r} and of one other module of "
            f"{plan.model.name}, which has {', '.join(names)}."
        )
    for name, cap in caps.items():
        if cap < 1:
            raise UserError(f"microbatch_caps: the cap of {name!r} is {cap}; it must be at least 1.")
    if plan.order != "given" and len(sizes := {unit.dp for unit in pipelined_units(plan)}) > 1:
        raise UserError(
            f"with microbatch_caps and order {plan.order!r} all units must have as many replicas, so that each takes "
            f"whole groups; they have dp {', '.join(map(str, sorted(sizes)))}."
        )


def _check_policy(plan: Plan) -> None:
    """`policy` is of phases that are balanced."""
    names = [module.name for module in plan.model.modules]
    for name in plan.policy:
        if plan.balance == "off":
            raise UserError(f"policy is of {name!r}, and with balance 'off' nothing is balanced by it; leave it out.")
        if name not in names:
            raise UserError(f"policy: {plan.model.name} has no module {name!r}; it has {', '.join(names)}.")


def _check_data_parallel(plan: Plan, unit: Unit) -> None:
    if unit.pp * unit.cp > 1 or unit.replicated or units_in_bubbles(plan):
        raise UserError(
            f"unit {unit.name!r}: under 'data_parallel' one unit holds all modules in one stage, with pp and cp 1."
        )
    for module in plan.model.modules:
        edges = [edge for edge in plan.model.edges if module.name in edge]
        if module.name != BACKBONE and edges not in ([(module.name, BACKBONE)], [(BACKBONE, module.name)]):
            raise UserError(
                f"module {module.name!r} must feed the backbone and nothing else, or be fed by it alone, under "
                "'data_parallel'."
            )
