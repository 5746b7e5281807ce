"""Optimus, Tables 4, 6 and 7 and Figures 16 and 17, of what the planner finds and simulates. Used by papers.py.

Table 7 and its steps: the search of benchmarks/bubbles.py, with the constants of papers_optimus.py. The rest is as
planner_optimus.py has it: catalogue's devices, no efficiency fitted, everything recomputed. Table 6: both encoders read
the image, each on 2,048 rows, and the LLM takes 512 rows of each; Megatron-LM has both on the first stage. Table 4 does
not say its degrees: each method has the best of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import bubbles
import papers_optimus
from baselines.chains import chain_plan, encoders_first
from papers_optimus import TABLES_5_7
from planner_optimus import FULL, GPT_175B, TABLE, VIT_11B, VIT_22B, Published, cases, megatron, optimus
from published import Range, Row
from trials import Outcome, Subject, job_of, with_any_tp

from motet.core.module_degrees import ModuleDegrees
from motet.core.plan import Plan
from motet.planner.candidate import Pins
from motet.planner.degrees import Degrees
from motet.planner.search import search
from motet.planner.strategies import STRATEGIES

VIT_5B = {"hidden": 3072, "mlp": 12_288, "num_heads": 24}
SECONDS = {"FSDP": 3.20, "Megatron-LM": 3.42, "Megatron-LM balanced": 3.04, "Optimus": 2.78}
"""Of Table 4, which is Table 10 again."""
DUAL = {
    "DualEnc(11B, 5B)": (VIT_11B, VIT_5B, 1.25),
    "DualEnc(22B, 5B)": (VIT_22B, VIT_5B, 1.26),
    "DualEnc(22B, 11B)": (VIT_22B, VIT_11B, 1.27),
}
"""Both encoders, and the most that Optimus gains (section 5.2.3)."""


def _table_4() -> Iterator[Row]:
    changes = {
        "run": {"batch_size": 16},
        "cluster": {"device": "a100-80g", "nodes": 1},
        "model": {
            "backbone": {"num_layers": 80, "hidden": 3072, "mlp": 12_288, "num_heads": 24},
            "encoders": {"image": {"hidden": 2304, "mlp": 9216, "num_heads": 18}},
        },
    }
    subject = Subject(with_any_tp(job_of("vit22b_gpt175b", changes, "ViT-3B + GPT-11B")))
    found = {
        "FSDP": _fsdp(subject),
        "Megatron-LM": _best_chain(subject, balanced=False),
        "Megatron-LM balanced": _best_chain(subject, balanced=True),
        "Optimus": subject.searched(
            Pins(("bubble filling",), recompute="full", modules={"image": ModuleDegrees(cp=1)})
        ),
    }
    for name, outcome in found.items():
        yield Row("Optimus, Table 4", name, "s", SECONDS[name], outcome.step_s, note=outcome.what)
    for name in list(SECONDS)[:-1]:
        gain = found["Optimus"].times(found[name])
        yield Row("Optimus, Table 4", f"Optimus over {name}", "times", SECONDS[name] / SECONDS["Optimus"], gain)


def _fsdp(subject: Subject) -> Outcome:
    """The best data parallelism, with all parameters sharded."""
    pins = Pins(("data parallel",), tp=1, recompute="full")
    plan = search(subject.job, STRATEGIES, pins).best.candidate.plan
    units = tuple(replace(unit, zero=3) for unit in plan.units)
    return subject.fastest(lambda: [("DP 8, ZeRO 3", replace(plan, units=units))])


def _best_chain(subject: Subject, *, balanced: bool) -> Outcome:
    """The fastest chain on 8 GPUs with PP above 1: in 1F1B with the encoder first, or interleaved and cut evenly."""

    def plans() -> Iterator[tuple[str, Plan]]:
        for tp, pp in ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)):
            dp = 8 // (tp * pp)
            for size in (1, 2):
                for chunks in (2, 4, 8) if balanced else (1,):
                    schedule = ("interleaved_1f1b", chunks) if balanced else ("1f1b", 1)
                    degrees = Degrees(tp, pp, dp, size, 16 // (dp * size), *schedule)
                    if degrees.num_microbatches % pp == 0:
                        yield (
                            degrees.words,
                            chain_plan(subject.job, degrees, None if balanced else encoders_first, FULL),
                        )

    return subject.fastest(plans)


def _dual(name: str) -> tuple[Published, Subject]:
    first, second, _ = DUAL[name]
    projector = {"kind": "linear", "downsample": 4}
    length = {"length": {"value": 2048}, "length_per_token": 4}
    encoders = {
        "image": {**first, "projector": projector},
        "second": {"kind": "vit", "num_layers": 48, "hidden": 6144, "mlp": 24_576, "num_heads": 48, **second}
        | {"projector": projector},
    }
    changes = {
        "run": {"batch_size": 256},
        "cluster": {"nodes": 64},
        "model": {"encoders": encoders},
        "workload": {
            "task": [{"name": "an image", "text": {"value": 1024}, "items": {"image": length, "second": length}}]
        },
    }
    row = Published(name, first, GPT_175B, 512, 256, 8, 12)
    return row, Subject(job_of("vit22b_gpt175b", changes, name))


def _table_6() -> Iterator[Row]:
    for name, (_, _, most) in DUAL.items():
        row, subject = _dual(name)
        gain = optimus(subject, row).times(megatron(subject, row, balanced=False))
        yield Row("Optimus, Table 6", f"{name}: Optimus over Megatron-LM", "times", most, gain)


def _table_7() -> Iterator[Row]:
    source, constants = "Optimus, Table 7, placed", papers_optimus.constants()
    for column in TABLES_5_7:
        found = bubbles.search(column, constants, bubbles.backbone_times(column, constants, tensor=False))
        what = f"{column}, Eff_fine"
        yield Row(source, what, "", column.fine, found.fine.hidden, 0.05, note=f"encoder PP {found.encoders.pp}")
        yield Row(source, f"{column}, iteration so", "s", column.optimus_s, found.fine.step_s, 0.05)


def _figure_17() -> Iterator[Row]:
    """The text says: at most 12 % above the thriftier baseline; in C below both, in D below the balanced one.

    The paper's own degrees of encoders are not given: the fastest, and two encoder pipelines to each of the LLM's
    (Figure 5), at the LLM's TP.
    """
    for case, published in zip(cases(), TABLE[:4]):
        letter = published.name[0]
        plain, balanced = (megatron(case.subject, published, balanced=balanced) for balanced in (False, True))
        other = balanced if letter == "D" else min(plain, balanced, key=lambda one: one.peak_gbytes)
        than = "the balanced baseline" if letter == "D" else "the thriftier baseline"
        two = {"image": ModuleDegrees(tp=8, pp=published.pp // 2)}
        for how, modules in (("fastest", None), ("two pipelines", two)):
            own = optimus(case.subject, published, modules)
            stated, ratio = Range(high=1.0 if letter in "CD" else 1.12), own.peak_gbytes / other.peak_gbytes
            what, note = f"Model {letter}, {how}: memory over {than}", f"{own.peak_gbytes:.1f} GB"
            yield Row("Optimus, Figure 17", what, "", stated, ratio, note=note)


TABLES: Mapping[str, Callable[[], Iterable[Row]]] = {
    "Optimus, Table 4": _table_4,
    "Optimus, Table 6": _table_6,
    "Optimus, Table 7, placed": _table_7,
    "Optimus, Figure 17": _figure_17,
}
