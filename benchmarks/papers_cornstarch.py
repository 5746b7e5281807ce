"""Cornstarch, Tables 2, 3, 10 and 11: throughput of pipelines of frozen encoders and a frozen LLM. Used by papers.py.

Tables 3, 10 and 11 give the seconds of a stage of the encoder and of the LLM, and throughput, but not how many stages
there are. Appendix D.1 does (Table 9), for some rows in contradiction to section 6.4 (as many stages aware as unaware)
and to the seconds themselves. In Table 3, counts that are not Table 9's are found from the seconds, so that such a row
is fitted; in Tables 10 and 11, where seconds do not tell them, they are Table 9's, and nothing is promised.

Nor does the paper say what an input is: throughput per GPU = 4 x 24 / (seconds x stages), where 24 microbatches of one
sample on two GPUs a stage would make it 24 / (2 x seconds x stages). The 4 is found on the first row of Table 3.

Table 2 gives no seconds: all stages are taken to be equal, each 1 / (LLM stages) of the LLM; one constant is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from published import Absent, Range, Row

from motet.schedule import one_f_one_b
from motet.schedule.generators.modality_parallel import modality_parallel
from motet.simulate import simulate, stage_times

NUM_MICROBATCHES = 24
INPUTS = 4
"""Of a microbatch, for each GPU of one stage: see above. Whole, and so found on one row and kept for all."""

UNIT = "input/s/GPU"


class Chain(NamedTuple):
    """A row of Table 3, 10 or 11: stages of the encoder and of the LLM, milliseconds of one of each, inputs a second
    and GPU. printed: the stages of Table 9, where others are taken."""

    model: str
    num_encoder: int
    num_llm: int
    encoder_ms: tuple[float, float]
    llm_ms: tuple[float, float]
    published: float
    promised: float | None = None
    printed: str = ""
    note: str = ""


TABLE_3 = (
    Chain("ALM-S aware", 1, 6, (57.25, 0.38), (81.73, 157.12), 1.94, 0.10),
    Chain("ALM-S unaware", 1, 6, (57.79, 0.38), (81.94, 157.14), 1.94, 0.10, "1 + 5"),
    Chain("ALM-M aware", 1, 6, (176.80, 0.64), (82.19, 157.51), 1.96, 0.10),
    Chain("ALM-M unaware", 2, 5, (93.39, 0.34), (98.25, 189.11), 1.70, 0.10, "4 + 4"),
    Chain("ALM-L aware", 1, 5, (308.16, 0.73), (100.20, 188.50), 1.98, 0.10, "2 + 4"),
    Chain("ALM-L unaware", 2, 4, (145.97, 0.33), (121.21, 235.23), 1.69, 0.10, "5 + 5"),
    Chain("VLM-S aware", 1, 6, (49.06, 0.12), (27.46, 43.03), 6.47, 0.10),
    Chain("VLM-S unaware", 2, 5, (26.49, 0.16), (28.13, 51.32), 5.30, None, "1 + 3"),
    Chain("VLM-M aware", 2, 5, (75.04, 0.27), (28.15, 51.30), 5.15),
    Chain("VLM-M unaware", 3, 4, (45.90, 0.16), (45.26, 84.89), 3.73, 0.10),
    Chain("VLM-L aware", 4, 5, (101.02, 0.20), (34.67, 63.77), 3.17, 0.10),
    Chain("VLM-L unaware", 5, 3, (70.42, 0.15), (67.03, 127.34), 2.06, 0.10),
)
"""With the medium LLM. The first row is the one that the factor is found on."""
SWAPPED = "the table's other row of this model"
TABLE_10 = (
    Chain("VLM-S aware", 2, 4, (32.80, 0.06), (18.80, 20.09), 13.79, note=SWAPPED),
    Chain("VLM-S unaware", 4, 4, (25.57, 0.05), (15.51, 15.09), 12.64, note=SWAPPED),
    Chain("VLM-M aware", 4, 2, (75.67, 0.15), (17.31, 20.08), 7.85),
    Chain("VLM-M unaware", 4, 1, (45.25, 0.09), (17.61, 20.33), 7.63, note="agrees with 9 stages"),
    Chain("VLM-L aware", 4, 1, (122.50, 0.13), (47.39, 60.31), 6.05, note=SWAPPED),
    Chain("VLM-L unaware", 5, 1, (98.27, 0.11), (26.22, 30.50), 4.81, note=f"{SWAPPED}; agrees with 7 stages"),
    Chain("ALM-S aware", 1, 5, (57.52, 0.20), (42.73, 70.21), 7.13, note="agrees with 4 or 5 stages"),
    Chain("ALM-S unaware", 2, 3, (30.14, 0.10), (42.30, 70.22), 5.34, note="agrees with 6 stages"),
    Chain("ALM-M aware", 2, 4, (92.19, 0.17), (32.54, 52.63), 4.85, note="agrees with 7 stages"),
    Chain("ALM-M unaware", 3, 2, (59.18, 0.12), (72.90, 105.22), 4.09),
    Chain("ALM-L aware", 3, 4, (97.77, 0.12), (33.27, 52.88), 4.29),
    Chain("ALM-L unaware", 4, 2, (76.81, 0.09), (62.01, 105.22), 3.59),
)
"""With the small LLM. Marks of what is aware are pictures; VLM-S and VLM-L have Table 9's counts in the other order."""
TABLE_11 = (
    Chain("VLM-S aware", 1, 5, (52.54, 0.10), (88.58, 171.72), 2.39),
    Chain("VLM-S unaware", 5, 3, (85.83, 0.10), (106.26, 171.38), 2.10, note="agrees with 6 stages"),
    Chain("VLM-M aware", 1, 5, (249.38, 0.49), (88.95, 171.68), 2.29),
    Chain("VLM-M unaware", 1, 5, (132.16, 0.26), (113.64, 213.58), 1.85),
    Chain("VLM-L aware", 1, 4, (481.44, 0.74), (106.53, 215.06), 1.76),
    Chain("VLM-L unaware", 2, 4, (246.22, 0.38), (146.62, 287.14), 1.81, note="agrees with 5 stages"),
    Chain("ALM-S aware", 1, 5, (76.84, 0.24), (286.16, 596.40), 0.72),
    Chain("ALM-S unaware", 1, 5, (78.80, 0.24), (285.07, 594.31), 0.73),
    Chain("ALM-M aware", 1, 5, (197.21, 0.45), (287.37, 597.47), 0.72),
    Chain("ALM-M unaware", 1, 3, (101.97, 0.24), (359.27, 743.91), 0.62, note="agrees with 5 or 6 stages"),
    Chain("ALM-L aware", 1, 5, (319.31, 0.50), (286.31, 596.50), 0.71),
    Chain("ALM-L unaware", 2, 4, (177.29, 0.27), (356.06, 742.80), 0.61),
)
"""With the large LLM, at TP 4."""


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


PEAK_FLOPS = 149.7e12
"""Of an A40, bf16."""
TOKENS = 1500
"""Of an input in the LLM, the least that section 6.1 has."""


def _table_3() -> Iterator[Row]:
    first, *_ = TABLE_3
    for chain in TABLE_3:
        found = ("factor 4",) if chain is first else ()
        found += ("stages",) if chain.printed else ()
        note = f"Table 9 says {chain.printed}" if chain.printed else ""
        yield _row("Cornstarch, Table 3", chain, ", ".join(found), note)
    # Forward, again for backward, and the gradient of the input: all that a frozen LLM of 8 B parameters computes.
    fastest = max(chain.published for chain in TABLE_3)
    share = fastest * 3 * 2 * 8e9 * TOKENS / PEAK_FLOPS
    what, note = "operations a second of the LLM over an A40's peak", "so an input is no sample (docs/papers.md)"
    yield Row("Cornstarch, Table 3", what, "", Range(high=1.0), share, note=note)


def _table_10() -> Iterator[Row]:
    return (_row("Cornstarch, Table 10", chain, "", chain.note) for chain in TABLE_10)


def _table_11() -> Iterator[Row]:
    return (_row("Cornstarch, Table 11", chain, "", chain.note) for chain in TABLE_11)


def _row(source: str, chain: Chain, fitted: str, note: str) -> Row:
    what = f"{chain.model}, {chain.num_encoder} + {chain.num_llm} stages"
    return Row(source, what, UNIT, chain.published, throughput(chain), chain.promised, fitted, note)


def throughput(chain: Chain) -> float:
    """Inputs a second and GPU of a simulated step."""
    num_stages = chain.num_encoder + chain.num_llm
    forward, backward = (
        np.repeat([encoder_ms / 1e3, llm_ms / 1e3], [chain.num_encoder, chain.num_llm])
        for encoder_ms, llm_ms in zip(chain.encoder_ms, chain.llm_ms)
    )
    timeline = simulate(one_f_one_b(num_stages, NUM_MICROBATCHES), stage_times(forward, backward))
    return INPUTS * NUM_MICROBATCHES / (timeline.makespan_s * num_stages)


def _table_2() -> list[Row]:
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
            "K, the mean over nine rows" if row.promised is not None else "",
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


TABLES: Mapping[str, Callable[[], Iterable[Row]]] = {
    "Cornstarch, Table 2": _table_2,
    "Cornstarch, Table 3": _table_3,
    "Cornstarch, Table 10": _table_10,
    "Cornstarch, Table 11": _table_11,
}
ABSENT = (
    Absent("Cornstarch, Figure 2", "a drawing of 8 microbatches, without seconds or degrees."),
    Absent("Cornstarch, Figure 3", "needs GPUs: seconds of single modules on an A40."),
    Absent("Cornstarch, Tables 7 and 8", "are jobs of benchmarks/planner.py, with Tables 2 and 3 once more."),
    Absent("Cornstarch, Figure 12", "needs GPUs: bars of one sample of Table 4, without numbers."),
)
