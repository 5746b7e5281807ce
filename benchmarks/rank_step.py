"""The steps of one rank under a Plan, as benchmarks take them: on a CPU, with drawn weights, which are not updated."""

from __future__ import annotations

import torch

from motet.core.plan import Plan
from motet.models.mllm import MLLM
from motet.models.part import keep_spans
from motet.runtime.held import HeldParameters
from motet.runtime.holders import sharing_groups
from motet.runtime.mesh import build_mesh
from motet.runtime.p2p import Lanes
from motet.runtime.place import Place
from motet.runtime.planned_step import PlannedStep
from motet.runtime.unit_groups import UnitGroups
from motet.train.planned_job import holders_of


def rank_step(plan: Plan, model: MLLM, rank: int) -> PlannedStep:
    """The step of a rank. model: whole; it is reduced to the rank's part, in place. A collective."""
    place, device = Place.of(plan, rank), torch.device("cpu")
    holders = holders_of(model, place.program)
    keep_spans(model, *place.stage_spans)
    lanes = Lanes(place.pairs, rank, device)
    lanes.connect()
    held = HeldParameters(model, place, holders, sharing_groups(place.program, holders.values()))
    return PlannedStep(model, plan.model, place, lanes, build_mesh(device), held, UnitGroups.of(place))
