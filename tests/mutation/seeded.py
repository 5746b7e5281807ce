"""Faults that are put into the runtime of Plans: what is lost, doubled, late or in the wrong place.

A fault raises nothing and changes no length, so that none of the product's own checks can see it: it is seen in the
result alone. Each is a function that patches the product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from motet.assign.rows import SentRows
from motet.chunked import RowChunks
from motet.runtime import held, planned_step, sections
from motet.runtime.clip import square_sum_of_share
from motet.runtime.held import HeldParameters
from motet.runtime.messages import Messages
from motet.runtime.p2p import Inbox
from motet.runtime.planned_step import _RunningPlan
from motet.runtime.replicas import ReplicatedGradients, _Bucket
from motet.runtime.sharded_state import ShardedState
from motet.schedule.program import Kind

Fault = Callable[[pytest.MonkeyPatch], None]


def fitted(content: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The content in the shape of another tensor, repeated or cut."""
    flat = content.detach().reshape(-1)
    times = -(-like.numel() // max(flat.numel(), 1))
    return flat.repeat(times)[: like.numel()].view_as(like)


def a_message_is_lost(patch):
    take = Inbox.take

    def lost(self):
        message = take(self)
        self.num_taken = getattr(self, "num_taken", 0) + 1
        return message.zero_() if self.num_taken == 1 else message

    patch.setattr(Inbox, "take", lost)


def a_receive_buffer_is_stale(patch):
    take = Inbox.take

    def stale(self):
        message = take(self)
        before, self.before = getattr(self, "before", message), message.clone()
        return fitted(before, message)

    patch.setattr(Inbox, "take", stale)


def sums_are_means(patch):
    start = ReplicatedGradients.start

    def mean(self):
        if self._num_started == 0 and self._is_shared:
            for bucket in self._buckets:
                bucket.flat /= self._group.size()
        start(self)

    patch.setattr(ReplicatedGradients, "start", mean)


def rows_are_in_another_order(patch):
    parts = planned_step.message_parts

    def turned(*args):
        for part in parts(*args):
            rows = part.rows or SentRows(np.arange(part.num_sent), np.arange(part.num_taken), part.num_taken)
            yield replace(part, rows=replace(rows, source=rows.source[::-1].copy()))

    patch.setattr(planned_step, "message_parts", lambda *args: tuple(turned(*args)))


def a_reduction_is_missed(patch):
    patch.setattr(ReplicatedGradients, "start", lambda self: None)


def microbatches_are_swapped(patch):
    backward, of_stage = _RunningPlan.backward, sections.SectionedStage.backward

    def fits(self, runs, gradients, *more):
        for run in runs[-1:]:
            name = run.section.span.module
            if gradients.get(name) is not None:
                gradients[name] = fitted(gradients[name], run.root.like)
        return of_stage(self, runs, gradients, *more)

    def swapped(self, action):
        runs, key, other = self.tensors.runs, *((action.stage, action.microbatch ^ bit) for bit in (0, 1))
        is_first = all((each.kind, each.stage) != (Kind.SEND_B, action.stage) for each in self.step.place.row.row)
        both = [*runs.get(key, ()), *runs.get(other, ())] if key in runs and other in runs else []
        ready = all(run.root is not None and not run.section.span.takes_loss for run in both)
        if both and ready and is_first:
            runs[key], runs[other] = runs[other], runs[key]
        backward(self, action)

    patch.setattr(sections.SectionedStage, "backward", fits)
    patch.setattr(_RunningPlan, "backward", swapped)


def tied_embeddings_are_not_summed(patch):
    finish = HeldParameters.finish

    def missed(self, device):
        self._unreduced = []
        return finish(self, device)

    patch.setattr(HeldParameters, "finish", missed)


def a_gradient_is_off_by_a_millionth(patch):
    update = planned_step.update_if_finite

    def off(optimizer, totals):
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        next(each.grad for each in parameters if each.grad is not None and each.grad.any()).mul_(1 + 1e-6)
        update(optimizer, totals)

    patch.setattr(planned_step, "update_if_finite", off)


def gradients_are_not_zeroed(patch):
    def kept(self):
        for parameter, view in zip(self.parameters, self._views):
            parameter.grad = view

    patch.setattr(_Bucket, "zero", kept)


def the_loss_is_divided_by_own_targets(patch):
    backward = _RunningPlan.backward

    def own(self, action):
        of_rank = 1 / max(sum(int(batch.sequences.targets.sum()) for batch in self.batches), 1)
        for run in self.tensors.runs.get((action.stage, action.microbatch), ()):
            run.section.loss_gradient = of_rank
        backward(self, action)

    patch.setattr(_RunningPlan, "backward", own)


def the_optimizer_steps_twice(patch):
    update = planned_step.update_if_finite

    def twice(optimizer, totals):
        update(optimizer, totals)
        update(optimizer, totals)

    patch.setattr(planned_step, "update_if_finite", twice)


def a_stage_is_not_stepped(patch):
    update = planned_step.update_if_finite
    patch.setattr(planned_step, "update_if_finite", lambda *args: update(*args) if dist.get_rank() else None)


def an_empty_microbatch_skips_the_reduction(patch):
    def has_all(one, action, batches):
        return all(held.computes(batch, one.sharing.module) for batch in batches)

    patch.setattr(held, "_has", has_all)


def copies_count_twice_in_the_norm(patch):
    patch.setattr(ReplicatedGradients, "square_sum", lambda self, device: square_sum_of_share(self.flat, 0, 1, device))


def no_gradient_comes_back(patch):
    parts = planned_step.message_parts
    patch.setattr(
        planned_step, "message_parts", lambda *args: tuple(replace(part, has_gradient=False) for part in parts(*args))
    )


def a_gradient_of_sent_rows_is_dropped(patch):
    receive = Messages._receive_gradients

    def dropped(self, action):
        receive(self, action)
        for rows in self._tensors.output_gradients.get((action.stage, action.microbatch), {}).values():
            rows[len(rows) // 2 :] = 0

    patch.setattr(Messages, "_receive_gradients", dropped)


def shards_are_not_gathered_anew(patch):
    patch.setattr(ShardedState, "is_updated", lambda self: None)


def rows_of_chunks_stay_as_they_came(patch):
    def appended(self, padded, span, chunk):
        first = self.ranks.size * span[0]
        padded[first : first + len(chunk)] = chunk

    patch.setattr(RowChunks, "put", appended)


def recomputation_draws_other_numbers(patch):
    patch.setattr(
        sections.SectionedStage, "_random_states", lambda self: [torch.Generator().manual_seed(99).get_state()]
    )
