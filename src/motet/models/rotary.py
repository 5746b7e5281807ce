"""Rotary positions whose frequencies depend on the length of a document, decided for each document of a pack.

LongRoPE (Ding et al. 2024, as in Phi-3) has two sets of frequencies: one for documents up to the length of the original
training, and one for longer ones. HF picks one for the whole call by the largest position in it, so a document would be
computed by the length of the longest one beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DocumentRotary(nn.Module):
    """HF's rotary module on packed documents, each as if it were called with that document alone.

    original: the longest document, in rows, that the first set of frequencies is for.
    """

    def __init__(self, rotary: nn.Module, original: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.original = original

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids int64 [1, rows], from 0 in each document -> cos, sin [1, rows, channels]."""
        document = (position_ids == 0).cumsum(-1) - 1
        last = torch.zeros_like(position_ids).scatter_reduce(-1, document, position_ids, "amax")
        long = last.gather(-1, document) >= self.original
        # The rows of the other documents stand at position 0, where they decide nothing.
        short_turns = self.rotary(x, position_ids=position_ids.masked_fill(long, 0))
        long_turns = self.rotary(x, position_ids=position_ids.masked_fill(~long, 0))
        return tuple(torch.where(long[..., None], b, a) for a, b in zip(short_turns, long_turns, strict=True))


def choose_by_document(causal_lm: nn.Module) -> None:
    """Put a DocumentRotary in the place of a model's rotary module if that chooses frequencies by the longest row."""
    rope = causal_lm.config.rope_parameters
    rotary = causal_lm.model.rotary_emb
    if rope.get("rope_type") == "longrope" and not isinstance(rotary, DocumentRotary):
        causal_lm.model.rotary_emb = DocumentRotary(rotary, rope["original_max_position_embeddings"])
