"""How heterogeneous a dataset is: how long its modalities are, how sequences are made up of them, and what that costs.

The share of each modality in each example's sequence is what OrchMLLM calls Modality Composition Incoherence (section
3.1, Figure 3): where shares vary, ranks that are balanced in one phase are not in another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from motet.analyze.lengths import LENGTH_UNITS, Lengths, read_lengths
from motet.analyze.loads import LENGTH_COSTS, SPEED_ASSUMPTION, Mix, PhaseLoads, PredictedSteps, sample_loads
from motet.balance import StepCosts
from motet.core.arrays import Float64Array, Int64Array
from motet.core.errors import UserError
from motet.data.index_lock import IndexProgress

TEXT, SEQUENCE = "text", "sequence"
_MAX_DRAWN = 10**7
"""Examples of all batches that are drawn, and loads of ranks that are kept of them."""


@dataclass(frozen=True, eq=False)
class AnalysisSubject:
    """What is analysed. costs: what items cost, with times. weighed: by what items are balanced, a sentence."""

    lengths: Lengths
    costs: StepCosts
    weighed: str


BY_LENGTH = (
    "Balanced on lengths, as no model is known; given a recipe, motet analyze balances on the operations of its model."
)


@dataclass(frozen=True, eq=False)
class LengthDistribution:
    """Lengths of one kind. values: int64 [n], each at least 1; unit: what is counted, tokens, patches or frames."""

    name: str
    unit: str
    values: Int64Array

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.values, share))

    @property
    def mean(self) -> float:
        return float(self.values.mean())


@dataclass(frozen=True, eq=False)
class Analysis:
    """What `analyze` found; all figures follow from the source and the arguments.

    lengths: of sequences and text in tokens, of items in what their encoder computes on.
    shares:  per modality, text included, its share of each example's sequence, float64 [num_examples], 0 where absent.
    weighed: by what items are balanced, a sentence.
    loads:   per phase, backbone first, the loads over the drawn batches.
    steps:   seconds that are predicted for the drawn batches, and which way of balancing would be chosen.
    """

    source: str
    num_examples: int
    num_ranks: int
    batch_size: int
    num_batches: int
    seed: int
    mix: Mix
    weighed: str
    assumptions: tuple[str, ...]
    left_out: str
    lengths: tuple[LengthDistribution, ...]
    shares: dict[str, Float64Array]
    loads: dict[str, PhaseLoads]
    steps: PredictedSteps


def analyze(
    source: str | Path | AnalysisSubject,
    *,
    num_ranks: int = 8,
    batch_size: int = 128,
    num_batches: int = 50,
    seed: int = 0,
    mix: Mix = "rows",
    tokenizer: str | Path | None = None,
    index_folder: str | Path | None = None,
    num_workers: int = 0,
    progress: IndexProgress | None = None,
) -> Analysis:
    """Analyse a manifest (by its index, headers only), a table of lengths (.csv, .csv.gz), or what has been read.

    batch_size: examples that are balanced together, over all ranks. num_batches: such batches, drawn with `seed`.
    mix: "rows" draws every example alike; "even" draws each combination of modalities alike often, for tables whose row
    counts are no mixing ratio. tokenizer: a directory; without one, a manifest's text tokens are estimated.
    Raises UserError for a source that is missing or wrong, and for arguments below 1.
    """
    for name, value in (("num_ranks", num_ranks), ("batch_size", batch_size), ("num_batches", num_batches)):
        if value < 1:
            raise UserError(f"{name} is {value}, but must be at least 1")
    if num_batches * max(batch_size, num_ranks) > _MAX_DRAWN:
        raise UserError(
            f"{num_batches:,} batches of {batch_size:,} examples on {num_ranks:,} ranks are too many to draw: batches "
            f"times examples, and batches times ranks, may be {_MAX_DRAWN:,}."
        )
    if isinstance(source, AnalysisSubject):
        subject = source
    else:
        lengths = read_lengths(
            source, tokenizer=tokenizer, index_folder=index_folder, num_workers=num_workers, progress=progress
        )
        stated = replace(lengths, assumptions=(*lengths.assumptions, SPEED_ASSUMPTION))
        subject = AnalysisSubject(stated, LENGTH_COSTS, BY_LENGTH)
    lengths = subject.lengths
    loads, steps = sample_loads(
        lengths,
        subject.costs,
        num_ranks=num_ranks,
        batch_size=batch_size,
        num_batches=num_batches,
        seed=seed,
        mix=mix,
    )
    return Analysis(
        source=lengths.source,
        num_examples=lengths.batch.num_examples,
        num_ranks=num_ranks,
        batch_size=batch_size,
        num_batches=num_batches,
        seed=seed,
        mix=mix,
        weighed=subject.weighed,
        assumptions=lengths.assumptions,
        left_out=lengths.left_out,
        lengths=_distributions(lengths),
        shares=_shares(lengths),
        loads=loads,
        steps=steps,
    )


def _distributions(lengths: Lengths) -> tuple[LengthDistribution, ...]:
    found = (
        LengthDistribution(SEQUENCE, "tokens", lengths.batch.sequence),
        LengthDistribution(TEXT, "tokens", lengths.text_tokens()),
        *(
            LengthDistribution(phase, LENGTH_UNITS[phase], lengths.batch.items[phase].length)
            for phase in lengths.phases
        ),
    )
    present = (replace(kind, values=kind.values[kind.values > 0]) for kind in found)
    return tuple(kind for kind in present if len(kind.values))


def _shares(lengths: Lengths) -> dict[str, Float64Array]:
    sequence = np.maximum(lengths.batch.sequence, 1)
    return {TEXT: lengths.text_tokens() / sequence} | {
        phase: lengths.tokens_of(phase) / sequence for phase in lengths.phases
    }
