"""The error that all ranks raise after one of them has failed, so that none waits for it."""

from __future__ import annotations

import traceback

import torch.distributed as dist

from motet.core.errors import JointUserError, RankFailure, UserError


def gather(value: object, group: dist.ProcessGroup) -> list:
    """The picklable value of every rank, on every rank, in order of ranks. A collective."""
    values: list = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def joint_error(error: BaseException | None, group: dist.ProcessGroup) -> BaseException:
    """The error that this rank raises after a rank has failed to load. error: this rank's own. A collective.

    If the first failure is a UserError, a JointUserError on all ranks. Else this rank's own error, or a RankFailure
    with the first failure's traceback.
    """
    mine = None
    if error is not None:
        text = str(error) if isinstance(error, UserError) else "".join(traceback.format_exception(error))
        mine = (isinstance(error, UserError), text)
    rank, is_user_error, text = next(
        (rank, *failure) for rank, failure in enumerate(gather(mine, group)) if failure is not None
    )
    if is_user_error:
        return JointUserError(text)
    return error or RankFailure(f"loading failed on rank {rank}:\n{text}")
