"""One module, as a unit of its own, in stages: where it is cut, and the least that is recomputed so that it fits.

What stages recompute depends on the cut, and the best cut on what they recompute. So two cuts are tried: by the seconds
of blocks without recomputation and, if something must then be recomputed, with recomputation of all blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from motet.core.plan import Unit
from motet.core.spec import Layer
from motet.planner.disaggregated.allocation import Share
from motet.planner.job import Job
from motet.planner.stages.partition import partition
from motet.planner.stages.recompute import Fit, RecomputeMode, fit_rank, stage_bytes


@dataclass(frozen=True, eq=False)
class UnitStages:
    """The stages of a unit.

    counts:  blocks of each stage.
    stage_s: seconds of each stage for a mean microbatch: forward, backward and recomputation.
    fits:    what each stage recomputes, and the bytes of its rank.
    """

    share: Share
    counts: tuple[int, ...]
    stage_s: tuple[float, ...]
    fits: tuple[Fit, ...]

    @property
    def slowest_s(self) -> float:
        """Seconds of the slowest stage."""
        return max(self.stage_s)

    @property
    def shortfall_bytes(self) -> float:
        """What the stage lacks that lacks most; 0 if all fit."""
        return max(fit.shortfall_bytes for fit in self.fits)

    @property
    def num_recomputed(self) -> int:
        """Recomputed blocks of all stages."""
        return sum(count for fit in self.fits for count in fit.recompute[0].values())

    def unit(self, first_rank: int) -> Unit:
        """The unit of a Plan, on the ranks from first_rank on."""
        share = self.share
        recompute = tuple(fit.recompute[0] for fit in self.fits) if self.num_recomputed else ()
        stages = tuple({share.name: count} for count in self.counts)
        return Unit(share.name, stages, first_rank, dp=share.dp, pp=share.pp, tp=share.tp, recompute=recompute)


def cut_unit(job: Job, share: Share, num_after: int, num_microbatches: int, mode: RecomputeMode) -> UnitStages:
    """The stages of a unit with the ranks of `share`. O(blocks^2 * pp).

    num_after: stages after the unit on the longest way to the end: so many more microbatches are in flight.
    mode:      what is recomputed.
    """
    costs = job.block_costs(share.name, share.num_examples, share.tp)
    plain_s = costs.forward_s + costs.backward_s
    whole_s = plain_s + costs.recompute_s

    def fitted(counts: tuple[int, ...]) -> UnitStages:
        fits, stage_s = [], []
        for stage, (first, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
            in_flight = min(share.pp - stage + num_after, num_microbatches)
            fits.append(_fit(job, share, (first, stop), in_flight, mode))
            recompute_s = costs.recompute_s[first : first + fits[-1].recompute[0][share.name]]
            stage_s.append(float(plain_s[first:stop].sum() + recompute_s.sum()))
        return UnitStages(share, counts, tuple(stage_s), tuple(fits))

    cut = fitted(partition((whole_s if mode == "full" else plain_s).tolist(), share.pp))
    if mode == "least" and cut.num_recomputed:
        other = fitted(partition(whole_s.tolist(), share.pp))
        cut = min(cut, other, key=lambda cut: (cut.shortfall_bytes, cut.slowest_s))
    return cut


def _fit(job: Job, share: Share, span: tuple[int, int], in_flight: int, mode: RecomputeMode) -> Fit:
    """What a stage recomputes. span: its blocks, from the first to before the second."""
    name, recompute_s = share.name, job.block_costs(share.name, share.num_examples, share.tp).recompute_s

    def rows(module: str, layer: Layer) -> float:
        return float(job.work(module, layer, share.num_examples).rows.max())

    unit = Unit(name, ({name: span[1] - span[0]},), dp=share.dp, tp=share.tp)
    precision, taken_rows = job.mixed_precision(pipeline=True), partial(job.taken_rows, num_examples=share.num_examples)
    sizes = stage_bytes(job.model, unit, {name: span}, rows, taken_rows, in_flight, precision)
    return fit_rank([sizes], [{name: recompute_s[slice(*span)]}], job.capacity_bytes, mode)
