"""Buffers that change as a model trains: ranks would come to differ in them.

Weights are alike on all ranks, as gradients are summed. A buffer that a module changes by itself, such as the
statistics of BatchNorm, follows what one rank computes; a checkpoint has that of one rank, and all go on with it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from motet.core.errors import JointUserError
from motet.train.world import World


class Buffers:
    """The buffers of this rank's model that checkpoints have, as they are now.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> before = Buffers(norm)
        >>> before.first_changed()
        ''
        >>> _ = norm(Tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> before.first_changed()
        'running_mean'
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {name: buffer.clone() for name, buffer in self._stored()}

    def first_changed(self) -> str:
        """The name of the first one that is another now; "" if none is."""
        return next((name for name, buffer in self._stored() if not _equal(buffer, self._before.get(name))), "")

    def check(self, world: World) -> None:
        """Raise JointUserError if one has changed on any rank, and there are several ranks. A collective."""
        changed = [name for name in world.gather(self.first_changed()) if name]
        if changed and world.num_ranks > 1:
            raise JointUserError(
                f"The buffer {changed[0]} changes as the model trains, on each rank by what that rank computes, so "
                "that ranks come to differ, and a checkpoint would have that of one: take a layer without such a state "
                "(LayerNorm or GroupNorm in place of BatchNorm), freeze that part, or train on one rank."
            )

    def _stored(self) -> list[tuple[str, Tensor]]:
        stored = self._model.state_dict(keep_vars=True)
        return [(name, buffer.detach()) for name, buffer in self._model.named_buffers() if name in stored]


def _equal(now: Tensor, then: Tensor | None) -> bool:
    """Whether two buffers have the same values; nan is equal to nan."""
    return then is not None and (torch.equal(now, then) or torch.equal(now.nan_to_num(), then.nan_to_num()))
