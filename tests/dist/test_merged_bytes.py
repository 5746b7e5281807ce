"""What a rank holds while it merges a whole sequence, of which it runs a part, is what `cost/memory.py` says."""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmark import benchmark
from motet.core.example import TokenSequence
from motet.core.workload import BACKBONE, BatchLengths
from motet.cost.memory import FSDP_FP32, LayerBytes, stage_layers
from motet.dispatch import BalanceConfig, assemble
from motet.models.build import BackboneConfig, ModelConfig, build_mllm
from motet.models.spec import model_spec
from motet.train.balancing import build_orchestrator
from ranks import run_ranks

ROWS, WIDTH, VOCABULARY = 4000, 64, 100
CONFIG = {
    "hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": ROWS,
}  # fmt: skip


class Added(nn.Module):
    """A merge that adds to each row what a matrix makes of it."""

    takes_text = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, embeds, features, sequences):
        return embeds + self.linear(embeds)


def held_and_predicted(rank: int, num_ranks: int) -> tuple[bool, int, int]:
    """Whether the rank merges the sequence, the most bytes that it holds in embedding and merge, forward and backward,
    and those of the model.
    """
    mllm = build_mllm(ModelConfig(backbone=BackboneConfig(family="qwen2", config=CONFIG)), VOCABULARY)
    mllm.backbone.merge = Added()
    spec = model_spec(mllm)
    tokens = np.arange(ROWS) % VOCABULARY
    lengths = BatchLengths(np.array([ROWS]), np.array([ROWS - 1]), np.zeros(1, dtype=np.int32), {})
    orchestrator = build_orchestrator(
        BalanceConfig(method="split"), mllm, num_ranks, torch.device("cpu"), torch.float32
    )
    decision = orchestrator.decide(lengths)
    assert decision.merges and decision.cuts.degrees == {0: num_ranks}
    sequence = TokenSequence(tokens, np.arange(ROWS) > 0, (), np.zeros(0, dtype=np.int64))
    sequences = assemble(decision, lengths, rank, [sequence], {}).sequences
    sequences = replace(sequences, context=replace(sequences.context, group=dist.group.WORLD))
    mllm.backbone.enter(sequences, {}).sum().backward()  # Gradients are there from now on.
    with benchmark("memory") as memory, memory.LiveBytes() as live:
        mllm.backbone.enter(sequences, {}).sum().backward()
    layers = [
        placed for placed in stage_layers(spec, {BACKBONE: (0, 1)}, {}) if spec.takes_whole(BACKBONE, placed.layer)
    ]
    assert [placed.layer.kind for placed in layers] == ["embedding", "merge"]
    sizes = [LayerBytes.of(placed, ROWS, 1, FSDP_FP32) for placed in layers]
    predicted = sum(size.saved for size in sizes) + max(size.gradients for size in sizes)
    return len(sequences.context.merging.item) == ROWS, live.peak, predicted


def test_a_merging_rank_holds_what_layers_with_the_whole_sequence_take():
    found = run_ranks(held_and_predicted, 2)
    assert sorted(merges for merges, _, _ in found) == [False, True]
    for merges, held, predicted in found:
        assert 0.95 * predicted <= held <= 1.5 * predicted if merges else held < 0.4 * predicted
