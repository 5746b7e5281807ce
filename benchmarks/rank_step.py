"""The steps of one rank under a Plan, as benchmarks take them: on a CPU, with drawn weights, which are not updated."""

from __future__ import annotations

import torch

from motet.core.plan import Plan
from motet.models.mllm import MLLM
from motet.models.part import keep_spans
from motet.runtime.held import HeldParameters, share_out_part
from motet.runtime.holders import sharing_groups
from motet.runtime.mesh import build_mesh
from motet.runtime.p2p import Lanes
from motet.runtime.place import Place
from motet.runtime.planned_step import PlannedStep
from motet.runtime.unit_groups import UnitGroups
from motet.train.planned_job import divide_part, holders_of, split_products


def rank_step(plan: Plan, model: MLLM, rank: int) -> PlannedStep:
    """The step of a rank. model: whole; it is reduced to the rank's part, in place. A collective."""
    place, device = Place.of(plan, rank), torch.device("cpu")
    split_products(model, place.program)
    holders = holders_of(model, place.program)
    keep_spans(model, *place.stage_spans)
    lanes = Lanes(place.pairs, rank, device)
    lanes.connect()
    units = UnitGroups.of(place)
    groups = {**units.by_ranks(place), **sharing_groups(place.program, holders.values())}
    divide_part(model, place, units)
    share_out_part(model, place, holders, groups, device)
    held = HeldParameters(model, place, holders, groups)
    return PlannedStep(model, plan.model, place, lanes, build_mesh(device), held, units)
