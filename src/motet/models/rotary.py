"""Rotary positions whose frequencies depend on the length of each document in a pack.

LongRoPE (Ding et al. 2024, as in Phi-3) has two sets of frequencies: one for documents up to the original training
length, one for longer documents. "dynamic" ones (NTK-aware scaling, as in InternVL3) have a set for each length beyond
that of training. HF chooses one set per call by the largest position in it, and keeps the longest of all calls in mind,
so the longest document would decide for all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from motet.core.arrays import Int64Array
from motet.on_device import on_device


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
    """HF's rotary module on packed documents; each document gets the result of a call of a new module with it alone.

    rotary:   its `rope_type` is "longrope" or "dynamic".
    original: the length, in rows, of the longest document whose frequencies are the module's own.
    lengths:  int64 [1, rows] on the CPU, of the document of each row (`document_lengths`).
    """

    def __init__(self, rotary: nn.Module, original: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.original = original
        self.lengths = torch.zeros(1, 0, dtype=torch.int64)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids int64 [1, rows] -> cos, sin [1, rows, channels]. They count from 0 in each document."""
        cos, sin = self._turns(x, position_ids, self.rotary.inv_freq)
        for length in self.lengths[self.lengths > self.original].unique().tolist():
            is_so_long = on_device(self.lengths == length, position_ids.device)[..., None]
            turns = self._turns(x, position_ids, self._frequencies(length, position_ids.device))
            cos, sin = (torch.where(is_so_long, new, old) for new, old in zip(turns, (cos, sin), strict=True))
        return cos, sin

    def _frequencies(self, length: int, device: torch.device) -> Tensor:
        """Those of a document that is longer than `original`, as HF computes them."""
        made, _ = ROPE_INIT_FUNCTIONS[self.rotary.rope_type](self.rotary.config, device, seq_len=torch.tensor(length))
        return made

    def _turns(self, x: Tensor, position_ids: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """HF's turns by frequencies that it does not choose itself."""
        rotary = self.rotary
        kept = rotary.rope_type, rotary.inv_freq
        rotary.rope_type, rotary.inv_freq = "default", frequencies
        try:
            return rotary(x, position_ids=position_ids)
        finally:
            rotary.rope_type, rotary.inv_freq = kept


@contextmanager
def document_lengths(causal_lm: nn.Module, lengths: Int64Array) -> Iterator[None]:
    """In the block, rows are of documents of these lengths. lengths: int64 [rows], of the document of each row."""
    rotary = getattr(causal_lm.base_model, "rotary_emb", None)
    if not isinstance(rotary, DocumentRotary):
        yield
        return
    before, rotary.lengths = rotary.lengths, torch.from_numpy(lengths)[None]
    try:
        yield
    finally:
        rotary.lengths = before


def use_document_rotary(causal_lm: nn.Module) -> bool:
    """Replace a model's rotary module by a DocumentRotary if its frequencies follow from a document's length.

    Returns whether they do.
    """
    config = causal_lm.config
    rope = getattr(config, "rope_parameters", None) or {}
    original = {
        "longrope": rope.get("original_max_position_embeddings"),
        "dynamic": getattr(config, "max_position_embeddings", None),
    }.get(rope.get("rope_type"))
    if original is None:
        return False
    rotary = causal_lm.model.rotary_emb
    if not isinstance(rotary, DocumentRotary):
        causal_lm.model.rotary_emb = DocumentRotary(rotary, original)
    return True
