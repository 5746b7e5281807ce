"""The passes of encoders that share the ranks of one backbone pipeline: what is placed in its bubbles."""

from __future__ import annotations

from dataclasses import dataclass

from motet.planner.bubble_filling.backbone_bubbles import Slices

Passes = tuple[tuple[Slices, ...], ...]
"""Per pp rank of an encoder pipeline, and per encoder, the slices of one microbatch's pass; num 0 is no pass."""


@dataclass(frozen=True)
class Encoders:
    """The encoders beside one pipeline of the backbone, in k pipelines that are alike.

    The ranks of the backbone's pipeline are divided evenly: pp rank p of encoder pipeline j is its rank p * k + j.

    forward, backward: seconds of the passes of one microbatch.
    send_s:            a message from one pp rank to the next, and from the last one to the backbone.
    gather_s:          gathering the encoders' parameters, before the first pass of a rank.
    finish_s:          per pp rank, what follows the last pass on all of its ranks: reducing the encoders' gradients,
                       which these ranks do together, and the optimizer; () is 0.
    max_microbatches:  how many microbatches a pipeline may take, all of whose activations it may hold at once; 0 is
                       any number.
    """

    forward: Passes
    backward: Passes
    send_s: float = 0.0
    gather_s: float = 0.0
    finish_s: tuple[float, ...] = ()
    max_microbatches: int = 0

    @property
    def pp(self) -> int:
        """Ranks of a pipeline."""
        return len(self.forward)

    @property
    def has_backward(self) -> bool:
        """Whether any encoder has backward passes: a frozen one has none."""
        return any(slices.num for on_rank in self.backward for slices in on_rank)

    @property
    def microbatch_s(self) -> float:
        """Seconds of all passes of one microbatch."""
        passes = (*self.forward, *self.backward)
        return sum(slices.slice_s * slices.num for on_rank in passes for slices in on_rank)
