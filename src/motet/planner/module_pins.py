"""Pins of single modules: what they leave to each strategy, and whether a Plan has them.

A strategy that gives several modules one unit takes the degrees that their pins have in common (`common_pins`); one
that gives each module a unit of its own takes those of the backbone as its own (`backbone_pins`), and each other
module's beside them. What a strategy proposes all the same without a pin is ruled out (`unmet_pin`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from motet.core.errors import UserError
from motet.core.module_degrees import ModuleDegrees
from motet.core.plan import Plan
from motet.core.words import counted_words
from motet.core.workload import BACKBONE
from motet.planner.candidate import Pins
from motet.planner.infeasible import listed, one_of, tensor_degrees
from motet.planner.job import Job
from motet.schedule.check.fit import undivided_parts
from motet.schedule.layout import Layout


def degrees_of(plan: Plan, module: str) -> ModuleDegrees:
    """The degrees of a module in a Plan, all of them stated.

    Example: the image encoder fills the first rank of a chain, and a part of the second.
        >>> from motet.core.plan import Unit
        >>> from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
        >>> from motet.cost.catalogue import cluster
        >>> layer = Transformer(64, 256, num_heads=4)
        >>> model = multimodal("toy", language_model(layer, 2, 1000), [connect(vit("image", layer, 3), 64)])
        >>> chain = Unit("all", ({"image": 2}, {"image": 1, "backbone": 1}, {"backbone": 1}), pp=3, dp=2)
        >>> print(degrees_of(Plan(model, cluster("h100"), (chain,), batch_size=4), "image"))
        tp = 1, cp = 1, pp = 2, dp = 2, ep = 1
    """
    unit, layout = plan.unit_of(module), Layout(plan)
    holding = {layout.pipeline_rank(unit, stage) for stage, layers in enumerate(unit.stages) if layers.get(module)}
    return ModuleDegrees(unit.tp, unit.cp, max(len(holding), 1), unit.dp, unit.ep)


def unmet_pin(plan: Plan, modules: Mapping[str, ModuleDegrees]) -> str:
    """The first pin of a module that a Plan does not have, in words such as "image has dp = 1, not 2"; "" if it has all
    of them."""
    for name, degree, has, value in unmet_degrees(plan, modules):
        return f"{name} has {degree} = {has}, not {value}"
    return ""


def unmet_degrees(plan: Plan, modules: Mapping[str, ModuleDegrees]) -> Iterator[tuple[str, str, int, int]]:
    """Module, degree, what the Plan has and what is stated, of each stated degree that a Plan does not have."""
    for name, pinned in modules.items():
        found = degrees_of(plan, name)
        for degree, value in pinned.stated.items():
            if (has := getattr(found, degree)) != value:
                yield name, degree, has, value


def backbone_pins(pins: Pins) -> Pins:
    """The pins with those of the backbone's own unit among them. Raises UserError where the two differ."""
    return _with_degrees(pins, {BACKBONE: pins.of(BACKBONE)}, ("tp", "pp", "dp"), "the backbone has both")


def common_pins(pins: Pins) -> Pins:
    """The pins of a unit with all modules, which have its TP and DP. Raises UserError where theirs differ."""
    return _with_degrees(pins, pins.modules, ("tp", "dp"), "modules in one unit have one")


def _with_degrees(pins: Pins, modules: Mapping[str, ModuleDegrees], degrees: Iterable[str], why: str) -> Pins:
    for name, stated in modules.items():
        for degree in degrees:
            value, pinned = getattr(stated, degree), getattr(pins, degree)
            if value is not None and pinned not in (None, value):
                raise UserError(
                    f"{degree.upper()} of {name} is pinned to {value}, and another pin says {pinned}: {why}."
                )
            if value is not None:
                degree_pin: dict[str, int] = {degree: value}
                pins = replace(pins, **degree_pin)  # type: ignore[arg-type]
    return pins


def check_module_pins(job: Job, pins: Pins) -> None:
    """Raise UserError for pins of a module that the model lacks, for degrees and for caps that no Plan has."""
    known = [module.name for module in job.model.modules]
    for name in (*pins.modules, *pins.fields):
        if name not in known:
            raise UserError(f"{name} is pinned, and the model has no module {name!r}; it has {', '.join(known)}.")
    capped = {name for name, stated in pins.fields.items() if stated.cap is not None}
    if capped and capped != set(known) and (BACKBONE not in capped or len(capped) != 2):
        raise UserError(
            f"The cap of {', '.join(sorted(capped))} is pinned; caps are of {BACKBONE} and of one other module, or "
            f"under data parallelism of every one: {', '.join(known)}."
        )
    for name, stated in pins.modules.items():
        num_blocks, cluster = len(job.model.module(name).blocks), job.cluster
        if stated.tp is not None and stated.tp not in (degrees := tensor_degrees(job, name, on_fewer=True)):
            what = undivided_parts(job.model.module(name), stated.tp)
            raise UserError(
                f"{name} is pinned to tp = {stated.tp}{', and has ' if what else ''}{what}; it must be "
                f"{one_of(degrees)}, in a node or over whole ones, with whole heads and with known times."
            )
        cp, heads = stated.cp or 1, _heads_of_a_rank(job, stated) if name == BACKBONE else 0
        if job.exchange == "ulysses" and heads % cp:
            raise UserError(
                f"{name} is pinned to cp = {cp}, and context.exchange is {job.exchange!r}: cp must divide its "
                f'{counted_words(heads, "head")}, or set exchange = "group_cast".'
            )
        if stated.pp is not None and stated.pp > num_blocks:
            raise UserError(f"{name} is pinned to pp = {stated.pp}; it must be 1 to {num_blocks}, its blocks.")
        numbers = {layer.num_experts for layer in job.model.module(name).layers if layer.num_experts}
        if stated.ep not in (None, 1) and (not numbers or any(number % stated.ep for number in numbers)):
            has = f"{listed(sorted(numbers))} experts, which it must divide" if numbers else "no experts"
            raise UserError(f"{name} is pinned to ep = {stated.ep}, and its layers have {has}.")
        if (needed := stated.num_ranks) > cluster.num_ranks:
            raise UserError(
                f"{name} is pinned to {stated}, {counted_words(needed, 'rank')}, and the cluster has "
                f"{cluster.num_ranks:,}."
            )


def _heads_of_a_rank(job: Job, stated: ModuleDegrees) -> int:
    """Heads of the backbone on each of its pinned tensor-parallel ranks."""
    layers = job.model.module(BACKBONE).layers
    return next(layer.attention.num_heads for layer in layers if layer.attention is not None) // (stated.tp or 1)
