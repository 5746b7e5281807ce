"""What torch's messages and collectives are given in a step: counted beside the product, where it calls torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

SUMS = 7
"""Numbers that ranks add up at the end of a step, which are no gradients; no gradient of a test is as small."""


@contextmanager
def counted_collectives(
    sharing: Sequence[dist.ProcessGroup] = (), experts: dist.ProcessGroup | None = None
) -> Iterator[Counter[str]]:
    """Bytes that this rank sends in the block, by kind; of collectives, as rings send them.

    sharing: groups of ranks that share products, or whose rows of encoders come together. experts: of ranks that share
    experts; exchanges of others do not count.
    """
    sent: Counter[str] = Counter()
    isend, gather, scatter, reduce = dist.isend, dist.all_gather_single, dist.reduce_scatter_single, dist.all_reduce
    exchange = dist.all_to_all_single

    def passed_on(group):
        return (group.size() - 1) / group.size()

    def kind_of(group, kind):
        return "exchange" if group in sharing else kind

    def count_message(message, *given, **more):
        sent["p2p"] += message.nbytes
        return isend(message, *given, **more)

    def count_gather(whole, part, *, group, async_op=False):
        sent[kind_of(group, "gather")] += whole.nbytes * passed_on(group)
        return gather(whole, part, group=group, async_op=async_op)

    def count_scatter(part, whole, *, group, async_op=False, **more):
        sent[kind_of(group, "reduce")] += whole.nbytes * passed_on(group)
        return scatter(part, whole, group=group, async_op=async_op, **more)

    def count_reduce(whole, *given, group, **more):
        is_of_experts = whole.dtype == torch.int64  # How often they were chosen.
        if whole.numel() > SUMS or group in sharing or is_of_experts:
            kind = "exchange" if is_of_experts else kind_of(group, "reduce")
            sent[kind] += 2 * whole.nbytes * passed_on(group)
        return reduce(whole, *given, group=group, **more)

    def count_exchange(arrived, given, received=None, sizes=None, *, group, **more):
        if experts is not None and group is experts and sizes is not None:  # Else numbers of rows.
            own = sizes[dist.get_rank(group)]
            sent["exchange"] += (len(given) - own) * given[:1].nbytes if len(given) else 0
        return exchange(arrived, given, received, sizes, group=group, **more)

    with (
        mock.patch.object(dist, "isend", count_message),
        mock.patch.object(dist, "all_to_all_single", count_exchange),
        mock.patch.object(dist, "all_gather_single", count_gather),
        mock.patch.object(dist, "reduce_scatter_single", count_scatter),
        mock.patch.object(dist, "all_reduce", count_reduce),
    ):
        yield sent


def on_all_ranks(sent: Counter[str]) -> dict[str, float]:
    """The sums over ranks. A collective."""
    everywhere: list[Counter[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sent)
    kinds = ("p2p", "exchange", "gather", "reduce")
    return {kind: sum(each[kind] for each in everywhere) for kind in kinds}
