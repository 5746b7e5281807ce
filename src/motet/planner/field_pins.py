"""Pins of the fields of a Plan that are no degrees: of each module's unit, and of the whole Plan.

A field that can be changed alone (ZeRO stage, recomputation, first rank, caps, ...) is changed in what strategies
propose (`with_pinned_fields`); what then still has no pin is ruled out (`unmet`). Where units, blocks and degrees of
every module are pinned there is one Plan (`pinned_plan`). `pins_of` has every field of a Plan as pins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from motet.core.errors import UserError
from motet.core.module_degrees import ModuleDegrees
from motet.core.plan import Fill, Plan, Unit
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE
from motet.planner.candidate import Candidate, FieldPins, Pins, PruningStrategy, RuledOut, Strategy
from motet.planner.degrees import plan_degrees, plan_words
from motet.planner.job import Job
from motet.planner.module_pins import degrees_of, unmet_pin
from motet.planner.neighbours import on_first_ranks
from motet.planner.order import with_pinned_deal
from motet.schedule import check_fit

_ALONE = ("zero", "shard_size", "first_rank")
"""Fields of a unit that can be changed by themselves."""


def pins_of(plan: Plan) -> Pins:
    """Every decision of a Plan as a pin; units, and modules in a unit, in the order of the Plan.

    Not pinned are what the job decides (model, cluster, batch, precision, policy) and the names of units. The `ep` of a
    unit is pinned by those of its modules that have experts.
    """
    backbone, names = plan.unit_of(BACKBONE), [name for unit in plan.units for name in unit.modules]

    def degrees(name: str) -> ModuleDegrees:
        has_experts = any(layer.num_experts for layer in plan.model.module(name).layers)
        return degrees_of(plan, name) if has_experts else replace(degrees_of(plan, name), ep=None)

    return Pins(
        tp=backbone.tp,
        pp=backbone.pp,
        dp=backbone.dp,
        microbatch_size=plan.microbatch_size,
        schedule=plan.schedule,  # type: ignore[arg-type]
        balance=plan.balance,
        order=plan.order,
        filling=plan.filling,
        modules={name: degrees(name) for name in names},
        fields={name: fields_of(plan, name) for name in names},
        deferred_warmup=plan.deferred_warmup,
        fills=plan.fills,
    )


def fields_of(plan: Plan, module: str) -> FieldPins:
    """The fields of a module and of its unit, all of them stated but a cap that the Plan does not have."""
    unit = plan.unit_of(module)
    recompute = unit.recompute or tuple({} for _ in unit.stages)
    return FieldPins(
        unit=unit.name,
        blocks=tuple(stage.get(module, 0) for stage in unit.stages),
        recompute=tuple(counts.get(module, 0) for counts in recompute),
        zero=unit.zero,
        shard_size=unit.shard_size,
        first_rank=unit.first_rank,
        replicated=module in unit.replicated,
        cap=plan.microbatch_caps.get(module),
    )


def unmet(plan: Plan, pins: Pins) -> str:
    """The first pin of a module, of its unit or of its Plan that a Plan does not have, in words; "" if it has all."""
    return unmet_pin(plan, pins.modules) or next(_unmet_fields(plan, pins), "")


def _unmet_fields(plan: Plan, pins: Pins) -> Iterator[str]:
    units: dict[str, str] = {}
    for name, stated in pins.fields.items():
        found = fields_of(plan, name)
        for field, value in stated.stated.items():
            if field == "unit":  # What counts is which modules share one.
                if units.setdefault(value, found.unit or "") != found.unit:
                    yield f"{name} is not in the unit of the other modules of {value!r}"
            elif (has := getattr(found, field)) != value:
                yield f"{name} has {field} = {pin_text(has)}, not {pin_text(value)}"
    if len(set(units.values())) < len(units):
        yield f"modules that are pinned to the units {' and '.join(map(repr, units))} share one"
    for field in ("deferred_warmup", "fills"):
        if (value := getattr(pins, field)) is not None and getattr(plan, field) != value:
            yield f"{field} is {pin_text(getattr(plan, field))}, not {pin_text(value)}"


def with_pinned_fields(candidate: Candidate, pins: Pins) -> Candidate | RuledOut:
    """A proposed candidate with the pinned fields, as far as they can be changed alone; ruled out with the reason if it
    does not have all pins then, or does not fit."""
    plan = candidate.plan
    for name, degrees in pins.modules.items():
        plan = _with_experts(_with_context(plan, name, degrees), name, degrees)
    for name, stated in pins.fields.items():
        plan = _with_fields(plan, name, stated)
    if pins.deferred_warmup is not None and plan.schedule == "interleaved_1f1b":
        plan = replace(plan, deferred_warmup=pins.deferred_warmup)
    if pins.fills == ():
        plan = replace(plan, fills=())
    if why := unmet(plan, pins):
        return RuledOut(candidate.strategy, candidate.what, f"{why}, as is pinned.", nearly_fits=True)
    if plan == candidate.plan:
        return candidate
    try:
        check_fit(plan)
    except UserError as error:
        return RuledOut(candidate.strategy, candidate.what, str(error))
    what = candidate.what if plan_degrees(plan) == plan_degrees(candidate.plan) else plan_words(plan)
    return replace(candidate, plan=plan, what=what, bound_s=0.0)


def proposals_for(strategy: Strategy, job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
    """What a strategy proposes, with all pins; it is given those that strategies know, and what cannot have the others
    is ruled out. Raises UserError as it does."""
    for proposal in _before_pins(strategy, job, pins):
        dealt = with_pinned_deal(proposal, pins) if isinstance(proposal, Candidate) else proposal
        yield with_pinned_fields(dealt, pins) if isinstance(dealt, Candidate) else dealt


def _before_pins(strategy: Strategy, job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
    yield from strategy(job, _before_context(pins))
    if not isinstance(strategy, PruningStrategy):
        with suppress(UserError):  # There are not enough ranks, or no times of so few.
            yield from _sharing_sequences(strategy, job, pins)


def _sharing_sequences(strategy: Strategy, job: Job, pins: Pins) -> Iterator[Candidate]:
    """Plans for one rank in `cp`, where the backbone's is pinned, with as many ranks in place of each of its unit: the
    batch may have too few examples for replicas that CP could take its ranks from.
    """
    backbone, cluster = pins.of(BACKBONE), job.cluster
    if (cp := backbone.cp or 1) == 1 or cluster.num_ranks < cp:
        return
    per_node = cluster.ranks_per_node // cp
    nodes = cluster.num_nodes if per_node else cluster.num_ranks // cp
    fewer = job.on(replace(cluster, num_nodes=nodes, ranks_per_node=per_node or 1))
    whole = _before_context(pins)
    whole = replace(whole, dp=pins.dp, modules={**whole.modules, BACKBONE: replace(backbone, cp=None, ep=None)})
    for one in strategy(fewer, whole):
        if isinstance(one, Candidate) and one.plan.schedule != "data_parallel":
            unit = one.plan.unit_of(BACKBONE)
            plan = _with_unit(replace(one.plan, cluster=cluster), unit, replace(unit, cp=cp))
            estimate_s, what = one.estimate_s / cp, plan_words(plan)
            yield replace(one, plan=on_first_ranks(plan), what=what, estimate_s=estimate_s, bound_s=0.0)


def _before_context(pins: Pins) -> Pins:
    """The pins that strategies are given, which propose no context parallelism, as it takes its ranks from replicas,
    but for encoders in bubbles, and no expert parallelism, which has no ranks of its own."""

    def whole(degrees: ModuleDegrees) -> ModuleDegrees:
        return replace(degrees, ep=None, dp=degrees.dp and degrees.dp * (degrees.cp or 1))

    dp = pins.dp and pins.dp * (pins.of(BACKBONE).cp or 1)
    return replace(pins, dp=dp, modules={name: whole(degrees) for name, degrees in pins.modules.items()})


def pinned_plan(job: Job, pins: Pins) -> Plan | None:
    """The Plan whose every unit is pinned, with defaults for what is not; None where some module's unit, blocks or dp
    is open, or the schedule, the microbatch or what is recomputed. Raises UserError where it does not fit, and for pins
    that contradict each other."""
    names = list(pins.fields)
    parts = [(pins.fields[name], pins.of(name)) for name in names]
    is_open = any(None in (stated.unit, stated.blocks, degrees.dp) for stated, degrees in parts)
    if is_open or set(names) != set(job.model.num_blocks) or not (pins.schedule and pins.microbatch_size):
        return None
    if pins.recompute in ("least", "full"):
        if any(stated.recompute is None for stated, _ in parts):
            return None
        raise UserError(
            f"recompute is pinned to {pins.recompute!r}, and of each module which blocks are; leave one of them out."
        )
    by_unit: dict[str, list[str]] = {}
    for name, (stated, _) in zip(names, parts):
        by_unit.setdefault(stated.unit or "", []).append(name)
    units = tuple(_pinned_unit(job.model, unit, modules, pins) for unit, modules in by_unit.items())
    balance = pins.balance or "off"
    plan = Plan(
        job.model,
        job.cluster,
        units,
        job.batch_size,
        pins.microbatch_size,
        pins.schedule,
        deferred_warmup=bool(pins.deferred_warmup),
        precision=job.precision,
        moments=job.moments,
        balance=balance,
        fills=pins.fills or (),
        order=pins.order or "given",
        microbatch_caps={name: stated.cap for name, (stated, _) in zip(names, parts) if stated.cap is not None},
        policy=job.policy_under(balance) if pins.schedule == "data_parallel" else {},
        filling=pins.filling or "static",
    )
    if any(stated.first_rank is None for stated, _ in parts):
        plan = on_first_ranks(plan)
    if why := unmet(plan, pins) or _unmet_whole(plan, pins):
        raise UserError(f"{why}, as is pinned.")
    check_fit(plan)
    return plan


def _unmet_whole(plan: Plan, pins: Pins) -> str:
    """The first pin of the whole Plan that contradicts one of a module, in words; "" if none does."""
    unit = plan.unit_of(BACKBONE)
    for degree in ("tp", "dp"):
        if not pins.allow(**{degree: getattr(unit, degree)}):
            return f"{BACKBONE} has {degree} = {getattr(unit, degree)}, not {getattr(pins, degree)}"
    is_recomputed = any(unit.recompute for unit in plan.units)
    return "blocks are recomputed, and not none" if pins.recompute == "none" and is_recomputed else ""


def _pinned_unit(model: ModelSpec, name: str, modules: Sequence[str], pins: Pins) -> Unit:
    stated = [{**pins.fields[module].stated, **pins.of(module).stated} for module in modules]
    if BACKBONE in modules:
        stated.append({"tp": pins.tp} if pins.tp else {})
    # What one of them states is the unit's; where two differ, the Plan lacks a pin (`unmet`).
    of_unit: dict[str, Any] = {key: value for one in reversed(stated) for key, value in one.items()}
    blocks = {module: pins.fields[module].blocks or () for module in modules}
    num_stages = max(map(len, blocks.values()))
    for module, counts in blocks.items():
        expected = 0 if pins.fields[module].replicated else model.num_blocks[module]
        if len(counts) != num_stages or sum(counts) != expected:
            raise UserError(
                f"{module}.blocks is pinned to {pin_text(counts)}; it must have a number for each of the {num_stages} "
                f"stages of its unit, {expected} in all."
            )
    own = [module for module in modules if not pins.fields[module].replicated]
    stages = ({module: blocks[module][stage] for module in own} for stage in range(num_stages))
    recompute = {module: pins.fields[module].recompute or (0,) * num_stages for module in modules}
    return Unit(
        name,
        tuple({module: count for module, count in stage.items() if count} for stage in stages),
        of_unit.get("first_rank", 0),
        of_unit.get("dp", 1),
        (pins.pp or num_stages) if BACKBONE in modules else num_stages,
        of_unit.get("tp", 1),
        of_unit.get("cp", 1),
        tuple(module for module in modules if pins.fields[module].replicated),
        _recomputed(recompute, num_stages),
        of_unit.get("zero", 1),
        of_unit.get("shard_size", 0),
        of_unit.get("ep", 1),
    )


def _recomputed(counts: Mapping[str, Sequence[int]], num_stages: int) -> tuple[Mapping[str, int], ...]:
    """Per stage, the recomputed blocks of each module; () for none at all."""
    if not any(map(any, counts.values())):
        return ()
    return tuple({name: of[stage] for name, of in counts.items() if of[stage]} for stage in range(num_stages))


def _with_context(plan: Plan, module: str, degrees: ModuleDegrees) -> Plan:
    """The unit of a module with its pinned CP, from ranks of its replicas."""
    unit, cp = plan.unit_of(module), degrees.cp or 1
    if unit.cp == cp or unit.cp > 1 or unit.dp % cp or plan.schedule == "data_parallel":
        return plan
    return _with_unit(plan, unit, replace(unit, cp=cp, dp=unit.dp // cp))


def _with_experts(plan: Plan, module: str, degrees: ModuleDegrees) -> Plan:
    """The unit of a module with its pinned EP, among the ranks that it has."""
    unit, ep = plan.unit_of(module), degrees.ep or 1
    if unit.ep == ep or unit.ep > 1 or unit.dp * unit.cp % ep:
        return plan
    return _with_unit(plan, unit, replace(unit, ep=ep))


def _with_fields(plan: Plan, module: str, stated: FieldPins) -> Plan:
    unit = plan.unit_of(module)
    changed: dict[str, Any] = {field: value for field, value in stated.stated.items() if field in _ALONE}
    if stated.recompute is not None and len(stated.recompute) == len(unit.stages):
        before = unit.recompute or tuple({} for _ in unit.stages)
        changed["recompute"] = tuple(
            {**counts, module: number} for counts, number in zip(before, stated.recompute, strict=True)
        )
    if stated.cap is not None:
        plan = replace(plan, microbatch_caps={**plan.microbatch_caps, module: stated.cap})
    return _with_unit(plan, unit, replace(unit, **changed)) if changed else plan


def _with_unit(plan: Plan, unit: Unit, changed: Unit) -> Plan:
    return replace(plan, units=tuple(changed if one is unit else one for one in plan.units))


def pin_text(value: object) -> str:
    """The value of a pin as it is written after `=`.

    Example:
        >>> pin_text((4, 2, 0)), pin_text(True), pin_text("1f1b")
        ('4,2,0', 'yes', '1f1b')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Fill):
        return f"{value.rank}:{value.action}<{value.before}"
    if isinstance(value, tuple):
        return ",".join(map(pin_text, value)) if value else "none"
    return str(value)
