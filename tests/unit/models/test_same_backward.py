"""Blocks run backward on a rank without rows where they do on ranks with rows, whatever is frozen.

FSDP gathers a block for its backward pass: a rank that runs others would wait for ranks that do not come.
"""

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from motet.models.block import Block
from unit.models.test_generator import DIM, QUERIES, module_of


class Before(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, values, sizes):
        return self.linear(values), sizes


def run_backward(blocks, compute):
    """Which of the blocks a backward pass goes through."""
    through = {}

    def note(block, _, output):
        hidden = output[0] if isinstance(output, tuple) else output
        through[block.number] = hidden.requires_grad

    hooks = [block.register_forward_hook(note) for block in blocks]
    compute()
    for hook in hooks:
        hook.remove()
    return through


def let_learn(parts, chosen):
    for part, learns in zip(parts, chosen, strict=True):
        for parameter in part if isinstance(part, list) else part.parameters():
            parameter.requires_grad_(learns)


@pytest.mark.parametrize("has_before", [False, True])
@pytest.mark.parametrize("chosen", [*product([False, True], repeat=4)])
def test_an_encoder_without_items(tiny, has_before, chosen):
    module = tiny.encoder("siglip")
    model = module.encoder.model
    sizes = torch.tensor([[4, 4]])
    values = tiny.values("siglip", sizes).double()
    if has_before:
        module.before = Before(values.shape[1])
    blocks = [each for each in module.modules() if isinstance(each, Block)]
    let_learn([model.embeddings, blocks[0], blocks[1], model.post_layernorm], chosen)
    module.train_encoder = any(chosen)
    with_items, without = (
        run_backward(blocks, lambda one=one: module(*one)) for one in ((values, sizes), (values[:0], sizes[:0]))
    )
    assert with_items == without and len(without) == len(blocks)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chosen", [*product([False, True], repeat=5)])
def test_a_backbone_without_rows(tiny, tied, chosen):
    backbone = tiny.backbone("qwen2", tie_word_embeddings=tied)
    text = backbone.causal_lm.model
    let_learn([backbone.causal_lm.lm_head, text.embed_tokens, *text.layers, text.norm], chosen)
    with_rows, without = (
        run_backward(text.layers, lambda one=one: backbone(one, {}))
        for one in (tiny.Packed.of([5]), tiny.Packed.of([]))
    )
    assert with_rows == without and len(without) == len(text.layers)


@pytest.mark.parametrize("from_backbone", [False, True])
@pytest.mark.parametrize("chosen", [*product([False, True], repeat=3)])
def test_a_generator_without_items(from_backbone, chosen):
    module, sizes = module_of(64, 16, 2), torch.tensor([[8, 8]])
    blocks = [each for each in module.modules() if isinstance(each, Block)]
    let_learn([module.entrance, *blocks], chosen)
    inside = {id(parameter) for part in (module.entrance, *blocks) for parameter in part.parameters()}
    let_learn([[each for each in module.parameters() if id(each) not in inside]], [False])
    rows = torch.randn(QUERIES, DIM, requires_grad=from_backbone)

    def backward(number):
        of_items = torch.randn(64 * number, 16), sizes[:number], rows[: QUERIES * number], np.arange(number)
        return run_backward(blocks, lambda: module(*of_items))

    assert backward(1) == backward(0) and len(backward(0)) == len(blocks)


def test_what_stands_behind_the_blocks_gets_zeros_without_rows(tiny):
    backbone = tiny.backbone("qwen2")
    text = backbone.causal_lm.model
    let_learn([text.embed_tokens, *text.layers], [False] * (1 + len(text.layers)))
    backbone(tiny.Packed.of([]), {})[0].backward()
    for part in (text.norm, backbone.causal_lm.lm_head):
        assert all(not each.grad.any() for each in part.parameters())
