"""OmniBal, Table 9: how models are cut into stages, and the GPU-days of 1.2 million samples. Used by papers.py.

A balanced microbatch is 9 images of 1,025 vision tokens and 4,096 tokens of the LLM (section 5.2), and there is one for
every 4.6 samples (Table 3, AVE-BS). InternViT's layers take 1.5 times the time of their operations, EVA-CLIP's once:
that is not in the paper, but found from its splits, and used for its GPU-days as well. GPU-days are then the operations
of forward and backward, and of forward again for as many layers of each stage as the table recomputes (its first ones),
over A100's 312 TFLOP/s and one efficiency.

The 1.5 may well be what it costs to share InternViT's 25 heads among an even number of GPUs: at TP = 1 (Llama3-8B) the
GPU-days agree without it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from published import Row

from motet.core.shapes import Transformer, language_model, vit
from motet.core.spec import Layer, Module
from motet.cost.flops import layer_flops, work_of
from motet.planner import partition

IMAGES, TEXT = np.full(9, 1024), np.array([4096])
NUM_MICROBATCHES = 1.2e6 / 4.6
PEAK_FLOPS, DAY_S = 312e12, 86_400


def _llm(num_layers: int, vocab_size: int, hidden: int, mlp: int, num_heads: int, num_kv_heads: int) -> Module:
    shape = Transformer(hidden, mlp, num_heads, num_kv_heads, gated=True, norm="rms", causal=True)
    return language_model(shape, num_layers, vocab_size)


def _vit(num_layers: int, hidden: int, mlp: int, num_heads: int) -> Module:
    return vit("image", Transformer(hidden, mlp, num_heads), num_layers, num_positions=1024, class_row=True)


LLMS = {
    "Llama3-8B": _llm(32, 128_256, 4096, 14_336, 32, 8),
    "InternLM2-20B": _llm(48, 92_544, 6144, 16_384, 48, 8),
    "Yi-34B": _llm(60, 64_000, 7168, 20_480, 56, 8),
    "Llama3-70B": _llm(80, 128_256, 8192, 28_672, 64, 8),
    "Qwen1.5-110B": _llm(80, 152_064, 8192, 49_152, 64, 8),
}
VITS = {
    "InternVL-6B": _vit(45, 3200, 12_800, 25),
    "EVA-CLIP-1B": _vit(40, 1408, 6144, 16),
    "EVA-CLIP-4B": _vit(64, 1792, 15_360, 16),
    "EVA-CLIP-8B": _vit(32, 4096, 20_480, 32),
    "EVA-CLIP-18B": _vit(48, 5120, 25_600, 40),
}


class Pair(NamedTuple):
    """A row of Table 9: layers of each stage, how many of them are recomputed, GPU-days of the balanced run.

    weight: of the operations of the vision layers; 0 is what their splits say.
    """

    vit: str
    llm: str
    layers: tuple[int, ...]
    recomputed: tuple[int, ...]
    gpu_days: float
    note: str = ""
    weight: float = 0.0

    @property
    def vit_weight(self) -> float:
        return self.weight or (1.5 if self.vit == "InternVL-6B" else 1.0)

    @property
    def name(self) -> str:
        return f"{self.vit} + {self.llm}"


REFERENCE = Pair("InternVL-6B", "InternLM2-20B", (22, 23, 24, 24), (0, 0, 0, 0), 21.3)
EVA_8B = Pair("EVA-CLIP-8B", "InternLM2-20B", (17, 18, 23, 22), (5, 5, 8, 10), 20.3)
TABLE_9 = (
    REFERENCE,
    Pair("InternVL-6B", "Llama3-8B", (16, 17, 20, 24), (8, 7, 10, 24), 13.8),
    Pair("InternVL-6B", "Llama3-8B", (16, 17, 20, 24), (8, 7, 10, 24), 13.8, "not weighted, as TP = 1", 1.0),
    Pair("InternVL-6B", "Yi-34B", (28, 29, 24, 24), (3, 2, 0, 0), 30.5),
    Pair("InternVL-6B", "Llama3-70B", (22, 23, 13, 14, 14, 14, 13, 12), (11, 12, 8, 5, 3, 2, 0, 0), 52.5),
    Pair("InternVL-6B", "Qwen1.5-110B", (21, 22, 13, 13, 14, 14, 14, 14), (6, 9, 1, 3, 0, 0, 0, 0), 75.2),
    Pair("EVA-CLIP-1B", "InternLM2-20B", (43, 16, 15, 14), (0, 0, 0, 0), 12.2),
    Pair("EVA-CLIP-4B", "InternLM2-20B", (39, 32, 21, 20), (10, 8, 1, 3), 17.0, "printed stages are 10 layers short"),
    EVA_8B,
    Pair("EVA-CLIP-18B", "InternLM2-20B", (18, 19, 25, 34), (2, 2, 0, 0), 33.8),
)


def rows() -> list[Row]:
    found = [
        Row("OmniBal, Table 9", pair.name, "layers", pair.layers, _split(pair), promised)
        for pair, promised in ((REFERENCE, 1), (EVA_8B, 0))
    ]
    flops_per_s = _flops(REFERENCE) / (REFERENCE.gpu_days * DAY_S)
    for pair in TABLE_9:
        fitted = f"efficiency {flops_per_s / PEAK_FLOPS:.1%}, weighted" if pair is REFERENCE else ""
        found.append(
            Row(
                "OmniBal, Table 9",
                pair.name,
                "GPU-days",
                pair.gpu_days,
                _flops(pair) / (flops_per_s * DAY_S),
                fitted=fitted,
                note=pair.note,
            )
        )
    return found


def _transformer_layers(pair: Pair) -> list[tuple[Layer, np.ndarray, float]]:
    """The layers that the paper counts, in order, each with what it is given and the weight of its operations."""
    vision = [(layer, IMAGES, pair.vit_weight) for layer in VITS[pair.vit].layers]
    text = [(layer, TEXT, 1.0) for layer in LLMS[pair.llm].layers]
    return [entry for entry in vision + text if entry[0].kind == "attention"]


def _split(pair: Pair) -> tuple[int, ...]:
    seconds = [weight * _passes(layer, given)[0] for layer, given, weight in _transformer_layers(pair)]
    return partition(seconds, len(pair.layers))


def _passes(layer: Layer, lengths: np.ndarray) -> list[float]:
    """Operations forward, for the input's gradient, for the weights'."""
    return [float(flops[0]) for flops in layer_flops(layer, work_of(layer, lengths))]


def _flops(pair: Pair) -> float:
    """Of the whole dataset, weighted, with recomputation and the output layer."""
    starts = np.cumsum([0, *pair.layers])
    again = {start + place for start, number in zip(starts, pair.recomputed) for place in range(number)}
    total = 0.0
    for place, (layer, given, weight) in enumerate(_transformer_layers(pair)):
        passes = _passes(layer, given)
        total += weight * (sum(passes) + (passes[0] if place in again else 0))
    head = LLMS[pair.llm].layers[-1]
    return NUM_MICROBATCHES * (total + sum(_passes(head, TEXT)))
