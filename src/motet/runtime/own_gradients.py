"""Gradients of parameters that one rank alone holds: as backward passes leave them, with nothing to sum over ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from motet.runtime.clip import square_sum


class OwnGradients:
    """The gradients of one module's parameters. A step begins without them, so that its first pass adds up nothing.

    num_copies:    tensor-parallel ranks that have the same parameters, and the same gradients.
    has_gradients: whether the step has gradients of them; `wait` makes those zero that no pass has used.

    Example:
        >>> used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
        >>> gradients = OwnGradients([used, unused])
        >>> gradients.zero()
        >>> (torch.tensor([3.0, 4.0]) * used).sum().backward()
        >>> gradients.wait()
        >>> used.grad.tolist(), unused.grad.tolist(), gradients.square_sum(torch.device("cpu")).item()
        ([3.0, 4.0], [0.0], 25.0)
    """

    def __init__(self, parameters: Iterable[nn.Parameter], num_copies: int = 1) -> None:
        self._num_copies = num_copies
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.has_gradients = False

    def clear(self) -> None:
        """Begin a step without gradients."""
        self.has_gradients = False
        for parameter in self._parameters:
            parameter.grad = None

    def zero(self) -> None:
        """Begin a step with gradients, after `clear`."""
        self.has_gradients = True

    def start(self) -> None:
        """There is nothing to sum over ranks."""

    def wait(self) -> None:
        """Until the step's gradients are there."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def square_sum(self, device: torch.device) -> Tensor:
        """This rank's share of the squared norm of the gradients, a float64 scalar."""
        return square_sum(self._parameters, self._num_copies, device)
