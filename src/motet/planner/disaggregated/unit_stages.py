"""One module, as a unit of its own, in stages: where it is cut, and the least that is recomputed so that it fits.

It is cut by forward and backward without recomputation or, if something is recomputed and that makes the slowest stage
faster, with all of it: which stages recompute hangs on the cut, and the cut on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from motet.core.plan import Unit
from motet.core.spec import Layer
from motet.planner.disaggregated.allocation import Share
from motet.planner.job import Job
from motet.planner.stages.partition import partition
from motet.planner.stages.recompute import Fit, RecomputeMode, fit_rank, stage_bytes


@dataclass(frozen=True, eq=False)
class UnitStages:
    """counts: blocks of each stage. stage_s: forward and backward of each, of a mean microbatch, with what is
    recomputed. fits: what that is, and the bytes of its rank."""

    share: Share
    counts: tuple[int, ...]
    stage_s: tuple[float, ...]
    fits: tuple[Fit, ...]

    @property
    def slowest_s(self) -> float:
        return max(self.stage_s)

    @property
    def shortfall_bytes(self) -> float:
        """Of the stage that lacks most; 0 where all fit."""
        return max(fit.shortfall_bytes for fit in self.fits)

    @property
    def num_recomputed(self) -> int:
        """Blocks, of all stages."""
        return sum(count for fit in self.fits for count in fit.recompute[0].values())

    def unit(self, first_rank: int) -> Unit:
        share = self.share
        recompute = tuple(fit.recompute[0] for fit in self.fits) if self.num_recomputed else ()
        stages = tuple({share.name: count} for count in self.counts)
        return Unit(share.name, stages, first_rank, dp=share.dp, pp=share.pp, tp=share.tp, recompute=recompute)


def cut_unit(job: Job, share: Share, num_after: int, num_microbatches: int, mode: RecomputeMode) -> UnitStages:
    """num_after: stages from the end of the unit to the end of the pipeline, on the longest way: so many more
    microbatches are under way. O(blocks^2 * pp)."""
    costs = job.block_costs(share.name, share.num_examples, share.tp)
    plain_s = costs.forward_s + costs.backward_s
    whole_s = plain_s + costs.recompute_s

    def filled(counts: tuple[int, ...]) -> UnitStages:
        fits, stage_s = [], []
        for stage, (first, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
            in_flight = min(share.pp - stage + num_after, num_microbatches)
            fits.append(_fit(job, share, (first, stop), in_flight, mode))
            recompute_s = costs.recompute_s[first : first + fits[-1].recompute[0][share.name]]
            stage_s.append(float(plain_s[first:stop].sum() + recompute_s.sum()))
        return UnitStages(share, counts, tuple(stage_s), tuple(fits))

    cut = filled(partition((whole_s if mode == "full" else plain_s).tolist(), share.pp))
    if mode == "least" and cut.num_recomputed:
        other = filled(partition(whole_s.tolist(), share.pp))
        cut = min(cut, other, key=lambda cut: (cut.shortfall_bytes, cut.slowest_s))
    return cut


def _fit(job: Job, share: Share, span: tuple[int, int], in_flight: int, mode: RecomputeMode) -> Fit:
    """Of the stage that has these blocks: first, and first after."""
    name, recompute_s = share.name, job.block_costs(share.name, share.num_examples, share.tp).recompute_s

    def rows(module: str, layer: Layer) -> float:
        return float(job.work(module, layer, share.num_examples).rows.max())

    unit = Unit(name, ({name: span[1] - span[0]},), dp=share.dp, tp=share.tp)
    sizes = stage_bytes(job.model, unit, {name: span}, rows, in_flight, job.mixed_precision(pipeline=True))
    return fit_rank([sizes], [{name: recompute_s[slice(*span)]}], job.capacity_bytes, mode)
