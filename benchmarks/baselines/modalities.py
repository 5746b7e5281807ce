"""The ways to put encoders into a pipeline that Cornstarch compares with (sections 2.2 and 6.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from motet.core.plan import Plan, Unit
from motet.core.workload import BACKBONE
from motet.planner.candidate import Pins
from motet.planner.job import Job
from motet.planner.modality_parallel.pipeline import ModalityPipeline
from motet.planner.modality_parallel.propose import modality_degrees
from motet.planner.stages.partition import partition


@dataclass(frozen=True)
class Stages:
    """A pipeline in 1F1B. num_encoder_stages: in front of the backbone's, each with a part of every encoder."""

    num_backbone_stages: int
    num_encoder_stages: int = 0
    tp: int = 1
    dp: int = 1
    microbatch_size: int = 1
    recomputed: bool = False


def encoders_colocated(job: Job, stages: Stages) -> Plan:
    """A chain whose first stages have a part of every encoder each, cut by the seconds of forward alone."""
    parts = {name: _by_forward(job, name, stages.num_encoder_stages, stages) for name in _encoders(job)}
    cut = [{name: counts[stage] for name, counts in parts.items()} for stage in range(stages.num_encoder_stages)]
    cut += [{BACKBONE: count} for count in _by_forward(job, BACKBONE, stages.num_backbone_stages, stages)]
    return _plan(job, stages, Unit("all", tuple(cut), pp=len(cut)))


def encoders_replicated(job: Job, stages: Stages) -> Plan:
    """The backbone's pipeline, each of whose stages computes all encoders."""
    cut = tuple({BACKBONE: count} for count in _by_forward(job, BACKBONE, stages.num_backbone_stages, stages))
    return _plan(job, stages, Unit("all", cut, pp=len(cut), replicated=_encoders(job)))


def frozen_unaware(job: Job, pins: Pins) -> Plan | None:
    """What modality parallelism proposes if it takes everything for trainable; None if no degrees divide the job."""
    _, degrees = next(modality_degrees(job, pins, aware=False), (0.0, None))
    if degrees is None:
        return None
    pipeline = ModalityPipeline(job, degrees, pins.recompute or "least", aware=False)
    return pipeline.plan(pipeline.settled())


def _encoders(job: Job) -> tuple[str, ...]:
    return tuple(source for source, sink in job.model.edges if sink == BACKBONE)


def _by_forward(job: Job, name: str, num_stages: int, stages: Stages) -> tuple[int, ...]:
    return partition(job.block_costs(name, stages.microbatch_size, stages.tp).forward_s.tolist(), num_stages)


def _plan(job: Job, stages: Stages, unit: Unit) -> Plan:
    unit = replace(unit, dp=stages.dp, tp=stages.tp, recompute=unit.stages if stages.recomputed else (), zero=1)
    return Plan(
        job.model, job.cluster, (unit,), job.batch_size, stages.microbatch_size, "1f1b", precision=job.precision
    )
