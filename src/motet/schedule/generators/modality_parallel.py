"""Encoders in a pipeline with an LLM (Cornstarch sections 2.2 and 4.1, Figures 1 and 6).

- Modality parallel: every module has ranks of its own, and encoders run beside each other.
- Replicated: only the LLM has a pipeline. Each stage computes all encoders before its own layers, as in Llama 3.
- Colocated: encoders are fused into stages before the LLM's. This is a chain like any other.
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
    """A Program of 1F1B across modules that each have stages of their own, with stage s on rank s, without
    communication.

    encoders, generators: number of stages by name.
    has_backward:         per stage. Stages are numbered by encoder, then LLM, then generator.
    With equal stage times the step takes (m - 1 + n_llm + stages of the longest encoder)(forward + backward).
    Raises ArgumentError as `dag_1f1b` does.
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
    """The Program in which stages run all encoders, for each microbatch, right before their own forward pass.

    encoders: by name, whether the encoder has a backward pass. It runs right after the stage's own.
    stages:   the stages that run them; None is all.
    The replica of encoder e beside the n-th of these stages is stage num_stages + e * len(stages) + n and feeds that
    stage. Where that has no backward pass and the encoder has one, nothing takes the output in: the replica feeds
    nothing, and goes back right after the stage's forward pass, as all replicas of an encoder sum their gradients.
    The replicas of an encoder form a group. Raises ArgumentError for passes in parts. O(actions * encoders).
    """
    if not encoders:
        return program
    hosts = range(program.num_stages) if stages is None else stages
    first = {stage: program.num_stages + index for index, stage in enumerate(hosts)}
    group = 1 + max((stage.group for stage in program.stages), default=-1)
    new_stages, edges = list(program.stages), list(program.edges)
    going_back = {action.stage for row in program.actions for action in row if action.kind in (Kind.B, Kind.I)}
    for number, (name, goes_back) in enumerate(encoders.items()):
        new_stages += [Stage(program.stages[stage].rank, name, group + number) for stage in hosts]
        fed = [stage for stage in hosts if stage in going_back or not goes_back]
        edges += [(first[stage] + number * len(hosts), stage) for stage in fed]
    has_backward = list(encoders.values())

    def expanded(action: Action) -> list[Action]:
        if action.stage not in first or action.kind not in (Kind.F, Kind.B, Kind.I):
            return [action]
        if action.part >= 0:
            raise ArgumentError(f"{action} is a part of a pass; encoders are added to whole passes.")
        replicas = [first[action.stage] + number * len(hosts) for number in range(len(encoders))]
        forward = [action._replace(stage=stage) for stage in replicas] if action.kind is Kind.F else []
        if action.kind is Kind.F and action.stage in going_back:
            return [*forward, action]
        reverse = zip(reversed(replicas), reversed(has_backward))
        backward = [action._replace(stage=stage, kind=Kind.B) for stage, has_one in reverse if has_one]
        return [*forward, action, *backward]

    rows = tuple(tuple(chain.from_iterable(map(expanded, row))) for row in program.actions)
    return replace(program, stages=tuple(new_stages), edges=tuple(edges), actions=rows)
