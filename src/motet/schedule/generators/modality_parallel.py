"""Encoders in a pipeline with an LLM (Cornstarch sections 2.2 and 4.1, Figures 1 and 6).

Modality parallel: every module has ranks of its own, and encoders run beside each other. Replicated: the pipeline is
the LLM's, and each of its stages computes all encoders whole before its own work (Llama 3's way). Encoders that are
fused into stages before the LLM's ("colocated" in the paper) are a chain like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from motet.core.errors import ArgumentError
from motet.core.workload import BACKBONE
from motet.schedule.generators.disaggregated import Pipeline, UnitEdge, disaggregated
from motet.schedule.program import Action, Kind, Program, Stage


def modality_parallel(
    encoders: Mapping[str, int],
    num_llm_stages: int,
    num_microbatches: int,
    *,
    generators: Mapping[str, int] | None = None,
    has_backward: Sequence[bool] | None = None,
) -> Program:
    """1F1B across modules that each have stages of their own, stage s on rank s; without communication.

    encoders, generators: num_stages by name. Stages are numbered by encoder, then LLM, then generator, and so is
    has_backward. With equal stages it takes (m - 1 + n_llm + the longest encoder)(f + b). Raises ArgumentError as
    `dag_1f1b` does.
    """
    after = dict(generators or {})
    num_stages = [*encoders.values(), num_llm_stages, *after.values()]
    names = [*encoders, BACKBONE, *after]
    units = [Pipeline((name,) * number) for name, number in zip(names, num_stages)]
    llm = len(encoders)
    feeds = [UnitEdge(unit, llm) for unit in range(llm)] + [UnitEdge(llm, unit) for unit in range(llm + 1, len(units))]
    flags = None
    if has_backward is not None:
        if len(has_backward) != sum(num_stages):
            raise ArgumentError(f"has_backward has {len(has_backward)} entries; there are {sum(num_stages)} stages.")
        left = iter(has_backward)
        flags = [[next(left) for _ in range(number)] for number in num_stages]
    return disaggregated(units, feeds, num_microbatches, flags)


def add_replicas(program: Program, encoders: Mapping[str, bool], stages: Sequence[int] | None = None) -> Program:
    """Let stages of a Program (all, if not said) run all encoders, for each microbatch, just before their own pass.

    encoders: by name, whether it has a backward pass, which runs right after the stage's. Replica e beside the n-th of
    the stages becomes stage num_stages + e * len(stages) + n, feeds it, and forms a group with the encoder's other
    replicas. Any schedule of whole passes will do; raises ArgumentError for passes in parts. O(actions * encoders).
    """
    beside = range(program.num_stages) if stages is None else stages
    first = {stage: program.num_stages + place for place, stage in enumerate(beside)}
    group = 1 + max((stage.group for stage in program.stages), default=-1)
    added, edges = list(program.stages), list(program.edges)
    for number, name in enumerate(encoders):
        added += [Stage(program.stages[stage].rank, name, group + number) for stage in beside]
        edges += [(first[stage] + number * len(beside), stage) for stage in beside]
    learns = list(encoders.values())

    def expanded(action: Action) -> list[Action]:
        if action.stage not in first or action.kind not in (Kind.F, Kind.B, Kind.I):
            return [action]
        if action.part >= 0:
            raise ArgumentError(f"{action} is a part of a pass; encoders are added to whole passes.")
        own = [action._replace(stage=first[action.stage] + number * len(beside)) for number in range(len(learns))]
        if action.kind is Kind.F:
            return [*own, action]
        return [action, *(other._replace(kind=Kind.B) for other, learned in zip(own[::-1], learns[::-1]) if learned)]

    rows = tuple(tuple(chain.from_iterable(map(expanded, row))) for row in program.actions)
    return replace(program, stages=tuple(added), edges=tuple(edges), actions=rows)
