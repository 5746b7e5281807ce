"""What both sides of trainers.py train: the sizes of a small LLaVA, its examples, and what a side is given to do.

It imports numpy alone, as it is read in the environment of either side.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

VOCABULARY, PATCH, TILE = 2048, 8, 32
"""TILE: pixels of an image's side; it becomes (TILE / PATCH) ** 2 tokens."""
TILE_TOKENS = (TILE // PATCH) ** 2
IMAGE_TOKEN = VOCABULARY - 1
VISION = {
    "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4, "image_size": TILE,
    "patch_size": PATCH, "vision_use_head": False,
}  # fmt: skip
TEXT = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 1 << 14,
}  # fmt: skip
LEARNING_RATE, BETAS, EPS, CLIP_NORM = 1e-5, (0.9, 0.95), 1e-8, 1.0


@dataclass(frozen=True)
class Example:
    """Tokens of text, the second half of which are targets, behind a number of images."""

    text_tokens: int
    num_images: int

    @property
    def num_tokens(self) -> int:
        return self.text_tokens + TILE_TOKENS * self.num_images

    @property
    def num_targets(self) -> int:
        return self.text_tokens - self.text_tokens // 2


@dataclass(frozen=True)
class Work:
    """batches: of all ranks together, in the order in which they are trained; rank r has the r-th part of each.

    collator:   of the Trainer: "padded" or "packed".
    weights:    a safetensors file in the Trainer's names.
    """

    batches: list[list[Example]]
    num_ranks: int
    collator: str
    weights: str
    seed: int

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Work:
        told = json.loads(path.read_text())
        return Work(**told | {"batches": [[Example(**each) for each in batch] for batch in told["batches"]]})

    def text(self, batch: int, place: int) -> NDArray[np.int64]:
        """The text of an example of a batch, int64 [text_tokens]."""
        rng = np.random.default_rng((self.seed, batch, place, 0))
        return rng.integers(0, IMAGE_TOKEN, self.batches[batch][place].text_tokens)

    def pixels(self, batch: int, place: int) -> NDArray[np.float32]:
        """The images of an example of a batch, float32 [num_images, 3, TILE, TILE]."""
        rng = np.random.default_rng((self.seed, batch, place, 1))
        return rng.standard_normal((self.batches[batch][place].num_images, 3, TILE, TILE), np.float32)


def taken_since(start_s: float, processor_s: float) -> dict[str, float]:
    """Seconds of a step by the clock and of the processor, and the processor's since the process started."""
    now_s = time.process_time()
    return {"step_s": time.perf_counter() - start_s, "processor_s": now_s - processor_s, "since_start_s": now_s}
