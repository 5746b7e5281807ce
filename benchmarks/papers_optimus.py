"""Optimus, Tables 5 and 7: iterations of ViT-22B + GPT-175B on 1,536, 2,048 and 3,072 GPUs. Used by papers.py.

The LLM runs as Appendix D says: PP = 8, TP = 8, 12 chunks, microbatches of 2, so 32, 24 or 16 of them in a pipeline.
Each of the 96 stages has one LLM layer, and takes its operations (with recomputation: the paper's "MFU" counts it) over
8 GPUs of 989 TFLOP/s at one efficiency. A step begins with a gather and ends with a reduction of the parameters of a
rank's first chunk, which nothing hides (section 2.2): the DP bubble, one constant of seconds, as the message does not
grow with the number of replicas. Of the encoder, the share that Table 7 gives as Eff_fine is hidden in bubbles; the
rest adds to the step.

Two constants, two published numbers of the 1,536-GPU row: efficiency from its iteration time, the DP bubble from its
Eff_coarse, the encoder work that fits before the LLM starts and after it ends. Eff_coarse of the other two rows follows
from that of the first whatever the constants: what is before and after the LLM does not depend on the number of
replicas, and the encoder work of a GPU is inversely proportional to it. So all three are fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
from published import Absent, Row

from motet.core.shapes import Transformer, language_model, vit
from motet.core.spec import Module
from motet.core.timeline import Timeline
from motet.cost.flops import layer_flops, step_flops, work_of
from motet.planner import partition
from motet.schedule import interleaved_1f1b
from motet.schedule.passes.data_parallel import add_data_parallel
from motet.simulate import bubbles, simulate, stage_times

BATCH_SIZE, MICROBATCH_SIZE, SEQUENCE = 1536, 2, 2048
PP, TP, NUM_CHUNKS = 8, 8, 12
PEAK_FLOPS = 989e12
DP_BUBBLE_S = 0.167 + 0.458
GATHER_SHARE = 0.167 / DP_BUBBLE_S
"""The DP bubble of Table 1, and the share of the all-gather in it."""

VIT = vit("image", Transformer(6144, 24576, 48), 48)
# Operations as Megatron's formula counts them: all pairs, and a vocabulary of GPT's, rounded up.
GPT = language_model(Transformer(12288, 4 * 12288, 96), 96, 51_200)


class Published(NamedTuple):
    """A column of Table 5 (iteration, of Optimus and of Megatron-LM balanced) and of Table 7."""

    num_gpus: int
    optimus_s: float
    balanced_s: float
    coarse: float
    fine: float

    def __str__(self) -> str:
        return f"{self.num_gpus:,} GPUs"

    @property
    def num_microbatches(self) -> int:
        return BATCH_SIZE * PP * TP // (self.num_gpus * MICROBATCH_SIZE)


TABLES_5_7 = (
    Published(1536, 9.80, 10.43, 0.343, 0.575),
    Published(2048, 7.29, 8.06, 0.458, 0.693),
    Published(3072, 4.87, 5.87, 0.687, 0.850),
)


class Constants(NamedTuple):
    efficiency: float
    dp_bubble_s: float


def constants() -> Constants:
    """Both, from the first column."""
    return _fit(TABLES_5_7[0])


def _table_1() -> Iterator[Row]:
    note = "of another job, of 5.12 s a step"
    found = constants().dp_bubble_s
    yield Row(
        "Optimus, Table 1", "DP bubble, both parts", "s", DP_BUBBLE_S, found, None, "on Table 7's Eff_coarse", note
    )


def _table_5() -> Iterator[Row]:
    source = "Optimus, Table 5"
    yield Row(source, "operations of an iteration", "", 5.12e18, _iteration_flops(), 0.01)
    for column in TABLES_5_7:
        is_first = column is TABLES_5_7[0]
        fitted = f"efficiency {constants().efficiency:.1%}" if is_first else ""
        promised = None if is_first else 0.03
        predicted = _optimus_s(column, constants())
        yield Row(source, f"{column}, Optimus", "s", column.optimus_s, predicted, promised, fitted)
    for column in TABLES_5_7:
        predicted = _balanced_s(column, constants())
        yield Row(source, f"{column}, Megatron-LM balanced", "s", column.balanced_s, predicted)


def _table_7() -> Iterator[Row]:
    for column in TABLES_5_7:
        is_first = column is TABLES_5_7[0]
        found = constants().dp_bubble_s
        fitted = f"DP bubble {found:.2f} s" if is_first else "the first row times the ratio of GPUs, with any constants"
        predicted = _coarse(column, constants())
        yield Row("Optimus, Table 7", f"{column}, Eff_coarse", "", column.coarse, predicted, None, fitted)


def _iteration_flops() -> float:
    lengths = np.full(BATCH_SIZE, SEQUENCE)
    return float(sum(step_flops(module, lengths, recomputed=True) for module in (VIT, GPT)))


@cache
def _fit(column: Published) -> Constants:
    """Both published numbers are linear in 1 / efficiency and in the DP bubble; so two equations give the two."""
    unit = Constants(1.0, 0.0)
    timeline = _llm(column, unit)
    encoder_s = _encoder_s(column, unit)
    bubble_s = _outer_bubble_s(timeline)
    equations = [
        [timeline.makespan_s + (1 - column.fine) * encoder_s, 1.0],
        [column.coarse * encoder_s - bubble_s, -1.0],
    ]
    slowness, dp_bubble_s = np.linalg.solve(equations, [column.optimus_s, 0.0])
    return Constants(1 / float(slowness), float(dp_bubble_s))


def _optimus_s(column: Published, constants: Constants) -> float:
    return _llm(column, constants).makespan_s + (1 - column.fine) * _encoder_s(column, constants)


def _coarse(column: Published, constants: Constants) -> float:
    return _outer_bubble_s(_llm(column, constants)) / _encoder_s(column, constants)


def _balanced_s(column: Published, constants: Constants) -> float:
    """All layers, of ViT and LLM, cut into 96 stages by Appendix B's algorithm."""
    seconds = [pass_s for module in (VIT, GPT) for pass_s in _layers_s(module, constants)]
    whole = [sum(passes) for passes in seconds]
    return _simulated(column, constants, seconds, partition(whole, PP, num_chunks=NUM_CHUNKS)).makespan_s


def _layers_s(module: Module, constants: Constants) -> list[tuple[float, float]]:
    """Forward and backward of each transformer layer on a microbatch, by 8 GPUs; recomputed. The output layer is added
    to the last one, and has nothing to recompute; stems and norms, a few parts in 10,000, are left out."""
    lengths = np.full(MICROBATCH_SIZE, SEQUENCE)
    flops_per_s = TP * PEAK_FLOPS * constants.efficiency
    found: list[tuple[float, float]] = []
    for layer in module.layers:
        forward, at_input, at_weight = (float(flops[0]) for flops in layer_flops(layer, work_of(layer, lengths)))
        if layer.kind == "attention":
            found.append((forward / flops_per_s, (at_input + at_weight + forward) / flops_per_s))
        elif layer.kind == "head":
            last = found.pop()
            found.append((last[0] + forward / flops_per_s, last[1] + (at_input + at_weight) / flops_per_s))
    return found


def _encoder_s(column: Published, constants: Constants) -> float:
    """What each GPU computes of the encoder in a step: the paper spreads it evenly over all."""
    flops = step_flops(VIT, np.full(BATCH_SIZE, SEQUENCE), recomputed=True)
    return flops / (column.num_gpus * PEAK_FLOPS * constants.efficiency)


@cache
def _llm(column: Published, constants: Constants) -> Timeline:
    return _simulated(column, constants, _layers_s(GPT, constants), (1,) * PP * NUM_CHUNKS)


def _simulated(
    column: Published, constants: Constants, layers_s: Sequence[tuple[float, float]], layers_of_stage: Sequence[int]
) -> Timeline:
    stages_s = np.add.reduceat(np.array(layers_s), np.cumsum([0, *layers_of_stage[:-1]]))
    exposed, trainable = dict.fromkeys(range(PP), 1), range(PP * NUM_CHUNKS)
    program = add_data_parallel(interleaved_1f1b(PP, NUM_CHUNKS, column.num_microbatches), exposed, trainable)
    gather_s = constants.dp_bubble_s * GATHER_SHARE
    times = replace(
        stage_times(*stages_s.T),
        gather_s=np.full(PP * NUM_CHUNKS, gather_s),
        reduce_s=np.full(PP * NUM_CHUNKS, constants.dp_bubble_s - gather_s),
    )
    return simulate(program, times)


def _outer_bubble_s(timeline: Timeline) -> float:
    """Of a rank, before its first pass and after its last."""
    mean_s = bubbles(timeline).mean_s
    return sum(mean_s[kind] for kind in ("dp_gather", "dp_reduce", "pp_warmup", "pp_cooldown"))


TABLES: Mapping[str, Callable[[], Iterable[Row]]] = {
    "Optimus, Table 1": _table_1,
    "Optimus, Table 5": _table_5,
    "Optimus, Table 7": _table_7,
}
ABSENT = (
    Absent("Optimus, Table 3 and Figure 15", "are jobs of benchmarks/planner.py."),
    Absent("Optimus, Table 4", "Alpa needs GPUs: its plans come from its own compiler."),
    Absent("Optimus, Table 10", "is Table 4 once more."),
    Absent("Optimus, Table 7", "the runtime of the search (322 to 15 s) is beside Motet's in benchmarks/bubbles.py."),
)
