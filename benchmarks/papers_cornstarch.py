"""Cornstarch, Tables 2 and 3: throughput of pipelines of frozen encoders and a frozen LLM. Used by papers.py.

Table 3 gives the seconds of a stage of the encoder and of the LLM, and throughput, but not how many stages there are.
Appendix D.1 does (Table 9), for some rows in contradiction to section 6.4 (as many stages aware as unaware) and to the
seconds themselves; what is promised is promised for counts that fit those. Nor does it say what an input is: throughput
per GPU = 4 x 24 / (seconds x stages) fits the whole table, where 24 microbatches of one sample on two GPUs a stage
would make it 24 / (2 x seconds x stages).

Table 2 gives no seconds: all stages are taken to be equal, each 1 / (LLM stages) of the LLM; one constant is fitted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from published import Row

from motet.schedule import one_f_one_b
from motet.schedule.generators.modality_parallel import modality_parallel
from motet.simulate import simulate, stage_times

NUM_MICROBATCHES = 24
INPUTS = 4
"""Of a microbatch, for each GPU of one stage: see above."""

UNIT = "input/s/GPU"


class Chain(NamedTuple):
    """A row of Table 3: stages of the encoder and of the LLM, milliseconds of one of each, inputs a second and GPU."""

    model: str
    num_encoder: int
    num_llm: int
    encoder_ms: tuple[float, float]
    llm_ms: tuple[float, float]
    published: float
    promised: float | None = None
    note: str = ""


TABLE_3 = (
    Chain("ALM-S aware", 1, 6, (57.25, 0.38), (81.73, 157.12), 1.94, 0.10),
    Chain("ALM-S unaware", 1, 6, (57.79, 0.38), (81.94, 157.14), 1.94, 0.10, "Table 9 says 1 + 5"),
    Chain("ALM-M aware", 1, 6, (176.80, 0.64), (82.19, 157.51), 1.96, 0.10),
    Chain("ALM-M unaware", 2, 5, (93.39, 0.34), (98.25, 189.11), 1.70, 0.10, "Table 9 says 4 + 4"),
    Chain("ALM-L aware", 1, 5, (308.16, 0.73), (100.20, 188.50), 1.98, 0.10, "Table 9 says 2 + 4"),
    Chain("ALM-L unaware", 2, 4, (145.97, 0.33), (121.21, 235.23), 1.69, 0.10, "Table 9 says 5 + 5"),
    Chain("VLM-S aware", 1, 6, (49.06, 0.12), (27.46, 43.03), 6.47, 0.10),
    Chain(
        "VLM-S unaware",
        2,
        5,
        (26.49, 0.16),
        (28.13, 51.32),
        5.30,
        None,
        "Table 9 says 1 + 3",
    ),
    Chain("VLM-M aware", 2, 5, (75.04, 0.27), (28.15, 51.30), 5.15),
    Chain("VLM-M unaware", 3, 4, (45.90, 0.16), (45.26, 84.89), 3.73),
    Chain("VLM-L aware", 4, 5, (101.02, 0.20), (34.67, 63.77), 3.17),
    Chain("VLM-L unaware", 5, 3, (70.42, 0.15), (67.03, 127.34), 2.06),
)


class Modality(NamedTuple):
    """A row of Table 2, modality parallel: stages of the LLM, of the vision and of the audio encoder."""

    model: str
    num_llm: int
    num_vision: int
    num_audio: int
    published: float
    promised: float | None = 0.05
    note: str = ""


TABLE_2 = (
    Modality("VALM-SS", 6, 1, 1, 2.68),
    Modality("VALM-SM", 6, 1, 1, 2.73),
    Modality("VALM-SL", 6, 1, 2, 2.25),
    Modality("VALM-MS", 6, 2, 1, 2.29),
    Modality("VALM-MM", 6, 2, 1, 2.22, note="printed 6 + 1 + 1"),
    Modality("VALM-ML", 6, 2, 2, 2.05),
    Modality("VALM-LS", 6, 3, 1, 1.92),
    Modality("VALM-LM", 6, 3, 1, 1.97),
    Modality("VALM-LL", 6, 3, 2, 1.82),
    Modality("VALM-MM as printed", 6, 1, 1, 2.22, None, "contradicts VALM-SS and VALM-SM"),
)


def rows() -> list[Row]:
    return [_chain(chain) for chain in TABLE_3] + _modalities()


def _chain(chain: Chain) -> Row:
    num_stages = chain.num_encoder + chain.num_llm
    forward, backward = (
        np.repeat([encoder_ms / 1e3, llm_ms / 1e3], [chain.num_encoder, chain.num_llm])
        for encoder_ms, llm_ms in zip(chain.encoder_ms, chain.llm_ms)
    )
    timeline = simulate(one_f_one_b(num_stages, NUM_MICROBATCHES), stage_times(forward, backward))
    throughput = INPUTS * NUM_MICROBATCHES / (timeline.makespan_s * num_stages)
    what = f"{chain.model}, {chain.num_encoder} + {chain.num_llm} stages"
    return Row("Cornstarch, Table 3", what, UNIT, chain.published, throughput, chain.promised, "", chain.note)


def _modalities() -> list[Row]:
    """One constant for all rows: the seconds that one pass of the whole LLM takes, and what an input is, in one."""
    shapes = [_unscaled(row) for row in TABLE_2]
    promised = [row.promised is not None for row in TABLE_2]
    constant = float(np.mean([row.published / shape for row, shape in zip(TABLE_2, shapes)], where=promised))
    return [
        Row(
            "Cornstarch, Table 2",
            f"{row.model}, {row.num_llm} + {row.num_vision} + {row.num_audio} stages",
            UNIT,
            row.published,
            constant * shape,
            row.promised,
            "K, one for all" if row.promised is not None else "",
            row.note,
        )
        for row, shape in zip(TABLE_2, shapes)
    ]


def _unscaled(row: Modality) -> float:
    """1 / (seconds x stages), where the LLM takes a second for a microbatch and no stage more than another."""
    num_stages = row.num_llm + row.num_vision + row.num_audio
    program = modality_parallel({"vision": row.num_vision, "audio": row.num_audio}, row.num_llm, NUM_MICROBATCHES)
    share = np.full(num_stages, 1 / row.num_llm)
    return 1 / (simulate(program, stage_times(share / 3, share * 2 / 3)).makespan_s * num_stages)
