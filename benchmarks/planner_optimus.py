"""Optimus, Tables 3 and 5: Models A to D, and Model D on 1,536 to 3,072 GPUs. Used by planner.py.

Degrees are those of Appendix D, TP 8 and microbatches of 2; all is recomputed, as the operations of Table 5 count it.
Optimus' own chunks of the backbone and degrees of the encoder are the planner's to find. "Megatron-LM" has the whole
encoder on the first of PP stages in 1F1B; "balanced" cuts all layers into V chunks a GPU, here exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from baselines.chains import chain_plan, encoders_first
from trials import Baseline, Case, Outcome, Subject, job_of

from motet.core.module_degrees import ModuleDegrees
from motet.core.plan import Plan
from motet.core.workload import BACKBONE
from motet.planner.candidate import Pins
from motet.planner.degrees import Degrees

VIT_11B = {"hidden": 4096, "mlp": 16_384, "num_heads": 32}
VIT_22B: dict[str, Any] = {}
LLAMA_70B = {
    "num_layers": 80,
    "hidden": 8192,
    "mlp": 28_672,
    "num_heads": 64,
    "num_kv_heads": 8,
    "gated": True,
    "norm": "rms",
    "biases": [],
    "vocab_size": 32_000,
}
GPT_175B: dict[str, Any] = {}
FULL = Pins(recompute="full")


class Published(NamedTuple):
    """A model of Table 3, or a column of Table 5 with its seconds; PP and V of Tables 11 and 12.

    over: by how much Optimus is faster than Megatron-LM, and than its balanced form; () is not said.
    """

    name: str
    encoder: dict[str, Any]
    backbone: dict[str, Any]
    num_gpus: int
    batch_size: int
    pp: int
    num_chunks: int
    optimus_s: float | None = None
    megatron_s: float | None = None
    balanced_s: float | None = None

    def over(self, other_s: float | None, most: float) -> tuple[float, ...]:
        """Figure 15 has bars alone; the text says the most of Models A to D."""
        return (1.0, most) if self.optimus_s is None or other_s is None else (other_s / self.optimus_s,)


TABLE = (
    Published("A: ViT-11B + LLAMA-70B", VIT_11B, LLAMA_70B, 64, 32, 4, 6),
    Published("B: ViT-22B + LLAMA-70B", VIT_22B, LLAMA_70B, 128, 64, 4, 6),
    Published("C: ViT-11B + GPT-175B", VIT_11B, GPT_175B, 256, 128, 8, 12),
    Published("D: ViT-22B + GPT-175B", VIT_22B, GPT_175B, 512, 256, 8, 12),
    Published("ViT-22B + GPT-175B", VIT_22B, GPT_175B, 1536, 1536, 8, 12, 9.80, 10.65, 10.43),
    Published("ViT-22B + GPT-175B", VIT_22B, GPT_175B, 2048, 1536, 8, 12, 7.29, 8.26, 8.06),
    Published("ViT-22B + GPT-175B", VIT_22B, GPT_175B, 3072, 1536, 8, 12, 4.87, 5.91, 5.87),
)


def cases() -> Iterator[Case]:
    for row in TABLE:
        changes = {
            "run": {"batch_size": row.batch_size},
            "cluster": {"nodes": row.num_gpus // 8},
            "model": {"backbone": row.backbone, "encoders": {"image": row.encoder}},
        }
        subject = Subject(job_of("vit22b_gpt175b", changes, row.name))
        yield Case(
            "Optimus",
            row.name,
            subject,
            "bubble filling",
            partial(optimus, subject, row),
            (
                Baseline(
                    "Megatron-LM",
                    partial(megatron, subject, row, balanced=False),
                    row.over(row.megatron_s, 1.22),
                    row.megatron_s,
                ),
                Baseline(
                    "Megatron-LM balanced",
                    partial(megatron, subject, row, balanced=True),
                    row.over(row.balanced_s, 1.18),
                    row.balanced_s,
                ),
                Baseline("encoders share items (cp), not the paper's", partial(optimus, subject, row, {})),
            ),
            row.optimus_s,
        )


def optimus(subject: Subject, row: Published, modules: Mapping[str, ModuleDegrees] | None = None) -> Outcome:
    """The backbone in the paper's degrees, encoders in its bubbles. modules: degrees of encoders that are pinned; None:
    a `cp` of 1, as the paper's have.
    """
    names = [module.name for module in subject.job.model.modules if module.name != BACKBONE]
    pinned = dict.fromkeys(names, ModuleDegrees(cp=1)) if modules is None else modules
    fixed = {"schedule": "interleaved_1f1b", "recompute": "full", "modules": pinned}
    return subject.searched(Pins(("bubble filling",), 8, row.pp, microbatch_size=2, **fixed))


def megatron(subject: Subject, row: Published, *, balanced: bool) -> Outcome:
    """In the paper's degrees: all encoders on the first stage, or all layers cut evenly."""

    def plans() -> Iterator[tuple[str, Plan]]:
        dp = row.num_gpus // (8 * row.pp)
        count = row.batch_size // (2 * dp)
        chunks = ("interleaved_1f1b", row.num_chunks) if balanced else ("1f1b", 1)
        degrees = Degrees(8, row.pp, dp, 2, count, *chunks)
        yield degrees.words, chain_plan(subject.job, degrees, None if balanced else encoders_first, FULL)

    return subject.fastest(plans)
