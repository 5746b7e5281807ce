"""Rotary positions whose frequencies depend on the length of each document in a pack.

LongRoPE (Ding et al. 2024, as in Phi-3) has two sets of frequencies: one for documents up to the original training
length, one for longer documents. HF chooses one set per call by the largest position in it, so the longest document
would decide for all others in the pack.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from motet.core.arrays import Int64Array


class Rotation:
    """The turns of packed rows by their positions: cos, sin [rows, head_dim] in at least float32.

    A plain class, not a dataclass or a tuple: FSDP's mixed precision rounds the tensors inside those.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    def apply(self, x: Tensor) -> Tensor:
        """x [..., rows, heads, head_dim], rotated, in its own dtype."""
        wide = x.to(self.cos.dtype)
        first, second = wide.chunk(2, dim=-1)
        turned = wide * self.cos[:, None] + torch.cat([-second, first], dim=-1) * self.sin[:, None]
        return turned.to(x.dtype)


class DocumentRotary(nn.Module):
    """HF's rotary module on packed documents; each document gets the result of a call with it alone.

    original: the length, in rows, of the longest document for the first set of frequencies.
    lengths: int64 [1, rows], of the document of each row; None: the rows are whole documents, one after the other.
    """

    def __init__(self, rotary: nn.Module, original: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.original = original
        self.lengths: Tensor | None = None

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids int64 [1, rows] -> cos, sin [1, rows, channels].

        They count from 0 in each document. Where rows are of documents that ranks share, `lengths` says how long these
        are.
        """
        if self.lengths is not None:
            long = (self.lengths > self.original).to(position_ids.device)
        else:
            document = (position_ids == 0).cumsum(-1) - 1
            last = torch.zeros_like(position_ids).scatter_reduce(-1, document, position_ids, "amax")
            long = last.gather(-1, document) >= self.original
        # Rows of the other documents get position 0, which does not affect HF's choice.
        short_turns = self.rotary(x, position_ids=position_ids.masked_fill(long, 0))
        long_turns = self.rotary(x, position_ids=position_ids.masked_fill(~long, 0))
        return tuple(torch.where(long[..., None], b, a) for a, b in zip(short_turns, long_turns, strict=True))


@contextmanager
def document_lengths(causal_lm: nn.Module, lengths: Int64Array | None) -> Iterator[None]:
    """In the block, rows are of documents that ranks share. lengths: int64 [rows], of the document of each row.

    None: the rows are whole documents.
    """
    rotary = None if lengths is None else getattr(causal_lm.base_model, "rotary_emb", None)
    if lengths is None or not isinstance(rotary, DocumentRotary):
        yield
        return
    rotary.lengths = torch.from_numpy(lengths)[None]
    try:
        yield
    finally:
        rotary.lengths = None


def use_document_rotary(causal_lm: nn.Module) -> bool:
    """Replace a model's rotary module by a DocumentRotary if it chooses frequencies by the largest position.

    Returns whether it does.
    """
    rope = getattr(causal_lm.config, "rope_parameters", None)
    if rope is None or rope.get("rope_type") != "longrope":
        return False
    rotary = causal_lm.model.rotary_emb
    if not isinstance(rotary, DocumentRotary):
        causal_lm.model.rotary_emb = DocumentRotary(rotary, rope["original_max_position_embeddings"])
    return True
