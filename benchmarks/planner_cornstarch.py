"""Cornstarch, Tables 2, 3, 7 and 8: VLMs, ALMs and VALMs on 24 A40. Used by planner.py.

TP 2 and 24 microbatches of one sample; stages are the paper's (of Table 3 as papers_cornstarch.py reads them). All is
frozen but for the projectors, and recomputed: in Table 3 the LLM's backward takes 1.6 to 1.9 times its forward. VALMs
are the recipe's, with an image of 1,024 patches and tokens and 30 seconds of audio in 1,500. From the seconds of Table
3 the medium LLM computes on about 1,500 tokens in VLMs and 4,000 in ALMs, and vision on 1,600 patches: those lengths
are found, not given. VLMs and ALMs are held against Table 3, VALMs against Tables 2, 7 and 8; where encoders are
replicated, the backbone has 6 stages (Appendix B.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from baselines.modalities import Stages, encoders_colocated, encoders_replicated
from papers_cornstarch import TABLE_3
from trials import Baseline, Case, Outcome, Subject, job_of

from motet.core.plan import Plan
from motet.core.workload import BACKBONE
from motet.planner.modality_parallel.pipeline import ModalityDegrees, ModalityPipeline

LLMS: Mapping[str, Mapping[str, Any]] = {
    "S": {"num_layers": 16, "hidden": 2048, "mlp": 8192, "num_heads": 32},
    "M": {},
    "L": {"num_layers": 64, "hidden": 5120, "mlp": 27_648, "num_heads": 40},
}
VISION: Mapping[str, Mapping[str, Any]] = {
    "S": {"num_layers": 40, "hidden": 1408, "mlp": 6144, "num_heads": 16},
    "M": {},
    "L": {"num_layers": 48, "hidden": 5120, "mlp": 25_600, "num_heads": 40},
}
AUDIO: Mapping[str, Mapping[str, Any]] = {
    "S": {"num_layers": 32, "hidden": 1920, "mlp": 7680, "num_heads": 30},
    "M": {},
    "L": {"num_layers": 48, "hidden": 5120, "mlp": 20_480, "num_heads": 40},
}
FOUND = "lengths, on Table 3's seconds"
IMAGE = {"length": {"value": 1600}, "length_per_token": 3.2}
CLIP = {"length": {"value": 3000}, "length_per_token": 1}
VLM = {"name": "an image", "text": {"value": 1000}, "items": {"image": IMAGE}}
ALM = {"name": "a clip", "text": {"value": 1000}, "items": {"audio": CLIP}}


class Valm(NamedTuple):
    """A row of Tables 2, 7 or 8: stages of the LLM and of colocated encoders; of LLM, vision and audio; throughputs."""

    model: str
    colocated: tuple[int, int]
    parallel: tuple[int, int, int]
    published: tuple[float, float]


TABLES: Mapping[str, tuple[Valm, ...]] = {
    "S": (
        Valm("SS", (3, 4), (3, 1, 1), (6.31, 8.82)),
        Valm("SM", (1, 3), (3, 1, 4), (5.20, 4.99)),
        Valm("SL", (1, 4), (3, 1, 5), (4.31, 4.61)),
        Valm("MS", (2, 4), (3, 3, 1), (5.18, 5.24)),
        Valm("MM", (1, 4), (3, 2, 3), (3.93, 4.66)),
        Valm("ML", (1, 5), (3, 2, 4), (3.40, 3.78)),
        Valm("LS", (1, 4), (3, 5, 1), (3.82, 3.96)),
        Valm("LM", (1, 6), (2, 4, 3), (2.96, 3.42)),
        Valm("LL", (1, 6), (2, 3, 3), (2.76, 3.25)),
    ),
    "M": (
        Valm("SS", (6, 1), (6, 1, 1), (3.09, 2.68)),
        Valm("SM", (6, 2), (6, 1, 1), (2.64, 2.73)),
        Valm("SL", (6, 2), (6, 1, 2), (2.57, 2.25)),
        Valm("MS", (6, 2), (6, 2, 1), (2.57, 2.29)),
        Valm("MM", (6, 3), (6, 2, 1), (2.21, 2.22)),
        Valm("ML", (6, 4), (6, 2, 2), (1.91, 2.05)),
        Valm("LS", (6, 4), (6, 3, 1), (1.95, 1.92)),
        Valm("LM", (6, 4), (6, 3, 1), (1.88, 1.97)),
        Valm("LL", (6, 5), (6, 3, 2), (1.74, 1.82)),
    ),
    "L": (
        Valm("SS", (5, 1), (5, 1, 1), (1.57, 1.33)),
        Valm("SM", (5, 2), (5, 1, 1), (1.37, 1.36)),
        Valm("SL", (5, 2), (5, 1, 1), (1.33, 1.37)),
        Valm("MS", (4, 1), (5, 1, 1), (1.57, 1.37)),
        Valm("MM", (4, 2), (5, 1, 1), (1.32, 1.37)),
        Valm("ML", (6, 1), (5, 1, 1), (1.04, 0.93)),
        Valm("LS", (4, 2), (5, 1, 1), (1.31, 1.36)),
        Valm("LM", (4, 3), (5, 1, 1), (1.10, 1.33)),
        Valm("LL", (4, 3), (5, 1, 1), (1.09, 1.36)),
    ),
}
"""By size of the LLM. VALM-MM of Table 2 has two stages of vision here, for the printed one (docs/papers.md)."""


def cases() -> Iterator[Case]:
    for aware, unaware in zip(TABLE_3[::2], TABLE_3[1::2]):
        name, size = aware.model.split()[0], aware.model[4]
        vision = name.startswith("VLM")
        encoders = {"image": VISION[size], "audio": None} if vision else {"image": None, "audio": AUDIO[size]}
        changes = {"model": {"encoders": encoders}, "workload": {"task": [VLM if vision else ALM]}}
        subject = Subject(job_of("valm_mm", changes, name))
        unaware_stages = unaware.num_encoder, unaware.num_llm
        yield _case(
            subject,
            f"{name}, LLM-M",
            (aware.num_encoder, aware.num_llm),
            Baseline(
                f"cut unaware of frozen, {unaware.num_llm} + {unaware.num_encoder}",
                partial(_parallel, subject, unaware_stages, aware=False),
                (aware.published / unaware.published,),
            ),
            FOUND,
        )
    for llm, rows in TABLES.items():
        for row in rows:
            encoders = {"image": VISION[row.model[0]], "audio": AUDIO[row.model[1]]}
            changes = {"model": {"backbone": LLMS[llm], "encoders": encoders}}
            subject = Subject(job_of("valm_mm", changes, f"VALM-{row.model}"))
            colocated = Stages(*row.colocated, tp=2, recomputed=True)
            yield _case(
                subject,
                f"VALM-{row.model}, LLM-{llm}",
                (*row.parallel[1:], row.parallel[0]),
                Baseline(
                    f"encoders colocated, {row.colocated[0]} + {row.colocated[1]}",
                    partial(_simulated, subject, encoders_colocated, colocated),
                    (row.published[1] / row.published[0],),
                ),
            )


def _case(subject: Subject, name: str, stages: tuple[int, ...], other: Baseline, fitted: str = "") -> Case:
    six = Stages(6, tp=2, recomputed=True)
    replicated = Baseline("encoders replicated, 6", partial(_simulated, subject, encoders_replicated, six))
    words = " + ".join(map(str, (stages[-1], *stages[:-1])))
    method = f"modality parallel, {words}"
    return Case(
        "Cornstarch", name, subject, method, partial(_parallel, subject, stages), (other, replicated), fitted=fitted
    )


def _parallel(subject: Subject, stages: tuple[int, ...], *, aware: bool = True) -> Outcome:
    """stages: of each encoder, then of the backbone, which comes last in the order of the data."""

    def plans() -> Iterator[tuple[str, Plan]]:
        assert subject.job.model.modules[-1].name == BACKBONE
        own = ModalityPipeline(subject.job, ModalityDegrees(stages, 2, 1, 1, subject.job.batch_size), "full", aware)
        yield own.words, own.plan(own.settled())

    return subject.fastest(plans)


def _simulated(subject: Subject, make: Any, stages: Stages) -> Outcome:
    return subject.fastest(lambda: [(f"TP {stages.tp}, {stages}", make(subject.job, stages))])
