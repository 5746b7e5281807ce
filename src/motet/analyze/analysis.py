"""The heterogeneity of a dataset: lengths of modalities, their shares of sequences, and the loads that follow.

OrchMLLM calls varying shares of a modality in sequences Modality Composition Incoherence (section 3.1, Figure 3): if
shares vary, ranks that are balanced in one phase are unbalanced in another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from motet.analyze.lengths import Lengths, read_lengths
from motet.analyze.loads import LENGTH_COSTS, SPEED_ASSUMPTION, Mix, PhaseLoads, PredictedSteps, sample_loads
from motet.balance import StepCosts
from motet.core.arrays import Float64Array, Int64Array
from motet.core.errors import UserError
from motet.data.index_lock import IndexProgress

TEXT, SEQUENCE = "text", "sequence"
_MAX_DRAWN = 10**7
"""The most examples of all drawn batches together, and the most loads of ranks that are stored for them."""


@dataclass(frozen=True, eq=False)
class AnalysisSubject:
    """The subject of an analysis that has been read before, such as a recipe's data and model.

    lengths: of all examples.
    costs:   the costs of items, with times.
    weighed: a sentence that says what items are balanced by.

    Example:
        >>> from motet.core.workload import BatchLengths, ItemLengths
        >>> media = dict.fromkeys(("image", "audio"), ItemLengths(*np.zeros((3, 0), int)))
        >>> batch = BatchLengths(np.arange(1, 9), np.ones(8, int), np.zeros(8, np.int32), media)
        >>> subject = AnalysisSubject(Lengths("chats", batch, ()), LENGTH_COSTS, "Balanced on lengths.")
        >>> analyze(subject, num_ranks=2, batch_size=4, num_batches=3).num_examples
        8
    """

    lengths: Lengths
    costs: StepCosts
    weighed: str


BY_LENGTH = (
    "Balanced on lengths, as no model is known; given a recipe, motet analyze balances on the operations of its model."
)


@dataclass(frozen=True, eq=False)
class LengthDistribution:
    """The lengths of sequences, of text, or of one modality's items.

    unit:   what is counted: tokens, patches or frames.
    values: int64 [n], each at least 1.

    Example:
        >>> lengths = LengthDistribution("text", "tokens", np.array([10, 20, 90]))
        >>> lengths.mean, lengths.quantile(0.5)
        (40.0, 20.0)
    """

    name: str
    unit: str
    values: Int64Array

    def quantile(self, share: float) -> float:
        """The length below which this share of the lengths is."""
        return float(np.quantile(self.values, share))

    @property
    def mean(self) -> float:
        """The mean length."""
        return float(self.values.mean())


@dataclass(frozen=True, eq=False)
class Analysis:
    """The result of `analyze`. Equal sources and arguments give equal figures.

    weighed:  a sentence that says what items are balanced by.
    left_out: a sentence on examples that cannot be used; empty if there are none.
    lengths:  of sequences and of text in tokens; of items in what their encoder computes on.
    shares:   per modality and for text, the share of each example's sequence, float64 [num_examples]; 0 if absent.
    loads:    per phase, backbone first, the loads of the drawn batches.
    steps:    the predicted seconds of the drawn batches, and the chosen balancing methods.
    is_weighted: whether mix "rows" draws examples by weights of their own.

    Example:
        >>> from motet.core.workload import BatchLengths, ItemLengths
        >>> media = dict.fromkeys(("image", "audio"), ItemLengths(*np.zeros((3, 0), int)))
        >>> batch = BatchLengths(np.array([9, 1, 1, 1]), np.ones(4, int), np.zeros(4, np.int32), media)
        >>> subject = AnalysisSubject(Lengths("chats", batch, ()), LENGTH_COSTS, "Balanced on lengths.")
        >>> loads = analyze(subject, num_ranks=2, batch_size=64, num_batches=10).loads["backbone"]
        >>> [f"{loads.max_over_mean(mode).mean():.2f}" for mode in ("off", "per_phase")]
        ['1.11', '1.00']
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
    is_weighted: bool = False


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
    """Analyse a manifest (by its index, headers only), a table of lengths (.csv, .csv.gz), or a subject read before.

    batch_size:  the number of examples that are balanced together, over all ranks.
    num_batches: the number of such batches, drawn with `seed`.
    mix:         "rows" draws every example equally often; "even" draws each combination of modalities equally often,
                 for tables whose row counts are not a mixing ratio.
    tokenizer:   a directory; without one, the number of a manifest's text tokens is estimated.
    Raises UserError for a source that is missing or wrong, and for arguments below 1.
    """
    _check_sizes(num_ranks, batch_size, num_batches)
    if isinstance(source, AnalysisSubject):
        subject = source
    else:
        subject = _by_length(
            read_lengths(
                source, tokenizer=tokenizer, index_folder=index_folder, num_workers=num_workers, progress=progress
            )
        )
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
        is_weighted=lengths.weight is not None,
    )


def _check_sizes(num_ranks: int, batch_size: int, num_batches: int) -> None:
    """Raise UserError for sizes below 1, and for too many drawn examples or loads."""
    for name, value in (("num_ranks", num_ranks), ("batch_size", batch_size), ("num_batches", num_batches)):
        if value < 1:
            raise UserError(f"{name} is {value}, but must be at least 1")
    if num_batches * max(batch_size, num_ranks) > _MAX_DRAWN:
        raise UserError(
            f"{num_batches:,} batches of {batch_size:,} examples on {num_ranks:,} ranks are too many to draw: batches "
            f"times examples, and batches times ranks, may be {_MAX_DRAWN:,}."
        )


def _by_length(lengths: Lengths) -> AnalysisSubject:
    """The subject of data without a model."""
    stated = replace(lengths, assumptions=(*lengths.assumptions, SPEED_ASSUMPTION))
    return AnalysisSubject(stated, LENGTH_COSTS, BY_LENGTH)


def _distributions(lengths: Lengths) -> tuple[LengthDistribution, ...]:
    """The distributions that have a length above 0."""
    distributions = (
        LengthDistribution(SEQUENCE, "tokens", lengths.batch.sequence),
        LengthDistribution(TEXT, "tokens", lengths.text_tokens()),
        *(
            LengthDistribution(phase, lengths.units[phase], lengths.batch.items[phase].length)
            for phase in lengths.phases
        ),
    )
    present = (replace(each, values=each.values[each.values > 0]) for each in distributions)
    return tuple(each for each in present if len(each.values))


def _shares(lengths: Lengths) -> dict[str, Float64Array]:
    sequence = np.maximum(lengths.batch.sequence, 1)
    return {TEXT: lengths.text_tokens() / sequence} | {
        phase: lengths.tokens_of(phase) / sequence for phase in lengths.phases
    }
