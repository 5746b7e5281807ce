"""Qwen2-Audio's encoder: Whisper's, then the mean of two rows before the last norm. A row covers four frames."""

from __future__ import annotations

from torch import Tensor

from motet.core.arrays import Int64Array
from motet.models.context_items import SharedItemRows
from motet.models.families.audio import AudioEncoder, averaged_here, real_rows


class Qwen2AudioEncoder(AudioEncoder):
    """HF's Qwen2AudioEncoder on clips of any length up to its position table."""

    pooled = 2

    def num_outputs(self, sizes: Int64Array) -> Int64Array:
        """Rows of each clip. As in HF an odd last row is dropped, so a clip of one or two frames has no row."""
        return super().num_outputs(sizes) // self.pooled

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The mean of two rows, the last norm, and the clips' own rows."""
        if shared is not None:
            return self.model.layer_norm(averaged_here(hidden, shared, self.num_outputs(sizes.numpy())))
        padded = hidden.unflatten(0, (len(sizes), -1))
        # No pair joins a clip's last row with padding: an odd last row is dropped.
        pooled = padded[:, : padded.shape[1] // 2 * 2].unflatten(1, (-1, 2)).mean(2)
        counts = self.num_hidden(sizes.numpy()) // 2
        return self.model.layer_norm(pooled).flatten(0, 1).index_select(0, real_rows(counts, pooled))


class Qwen2AudioTower(Qwen2AudioEncoder):
    """The encoder in its whole model, where a clip stands in silence: the last rows see two frames of it."""

    margin = 2
