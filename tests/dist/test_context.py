"""Backbones whose rows ranks share equal one process, in each way in which rows get to attention."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from motet.assign.context_rows import context_rows
from motet.balance import Packed
from motet.core.attention_table import AttentionTable
from motet.core.context_rows import ContextRows
from motet.core.example import TokenSequence
from motet.core.workload import BatchLengths
from motet.dispatch import Orchestrator, PackedSequences, assemble
from motet.dispatch.context import share_sequences
from motet.dropout import drawing
from motet.models.attention import ATTENTION
from motet.models.backbone import Backbone
from motet.models.context_items import ContextItems
from parity.cut_at_random import cut_at_random
from ranks import run_ranks

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": ATTENTION,
}
FAMILIES = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, attention_dropout=0.3)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=4)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=4, sliding_window=4, query_pre_attn_scalar=4)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES,
            head_dim=4,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            rms_norm_eps=1e-6,
        )
    ),
}
DOCUMENTS = ([17, 1, 30, 8], [1], [], [0, 2, 0], [64])
"""Lengths of packed documents; with few rows, ranks have none."""


def sequences_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    num_rows = sum(lengths)
    return PackedSequences(
        torch.from_numpy(rng.integers(0, 40, num_rows)),
        torch.from_numpy(rng.random(num_rows) < 0.6),
        torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        {},
    )


HOME = np.zeros(9, np.int32)


def targets_of(text):
    """The first token of a document is no target: nothing predicts it."""
    return int(text.targets[1:].sum())


def passed(backbone, sequences, keys=None):
    """Sum of the loss, number of targets, and gradients by name."""
    backbone.zero_grad()
    keys = np.arange(sequences.num_sequences) if keys is None else keys
    with drawing("backbone", {"backbone": keys}):
        loss, num_targets = backbone(sequences, {})
    loss.backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in backbone.named_parameters()}
    return loss.detach().clone(), num_targets, {name: gradient.clone() for name, gradient in gradients.items()}


def shared(sequences, rank, num_ranks, method, head_groups=1):
    lengths = np.diff(sequences.offsets.numpy()).astype(np.int64)
    share = share_sequences(context_rows(lengths, num_ranks), rank, sequences)
    share = replace(share, group=dist.group.WORLD, method=method, head_groups=head_groups)
    own = torch.from_numpy(share.own)
    return replace(sequences, tokens=sequences.tokens[own], targets=sequences.targets[own], context=share)


def errors(rank, num_ranks, family, methods, head_groups=1):
    torch.manual_seed(1)
    backbone, found = Backbone(FAMILIES[family]().to(torch.float64)).train(), {}
    for lengths in DOCUMENTS:
        sequences = sequences_of(lengths)
        loss, num_targets, gradients = passed(backbone, sequences)
        for method in methods:
            if not sum(lengths):
                continue  # No rank runs anything.
            of_rank = shared(sequences, rank, num_ranks, method, head_groups)
            own_loss, own_targets, own_gradients = passed(backbone, of_rank)
            dist.all_reduce(own_loss)
            counts = torch.tensor(own_targets)
            dist.all_reduce(counts)
            assert counts == num_targets
            worst = (own_loss - loss).abs().item() / max(loss.abs().item(), 1)
            for name, gradient in own_gradients.items():
                dist.all_reduce(gradient)
                worst = max(worst, (gradient - gradients[name]).abs().max().item())
            found[method, tuple(lengths)] = worst, sum(of_rank.context.sent)
    return found


@pytest.mark.parametrize(
    ("num_ranks", "family"),
    [(2, family) for family in FAMILIES]
    + [pytest.param(4, family, marks=() if family == "qwen2" else pytest.mark.slow) for family in FAMILIES],
)
def test_ranks_that_share_documents_equal_one_process(family, num_ranks):
    for found in run_ranks(errors, num_ranks, family, ("group_cast", "all_gather", "ulysses", "auto")):
        assert max(worst for worst, _ in found.values()) < 1e-10


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_groups_of_heads_equal_one_process(family):
    """With dropout, with windows and soft caps, and on ranks without rows."""
    for found in run_ranks(errors, 2, family, ("group_cast", "all_gather"), 2):
        assert max(worst for worst, _ in found.values()) < 1e-10


def errors_beside_whole_documents(rank, num_ranks, family):
    """As `errors`, where some documents are whole on a rank, and others shared, each by ranks of its own."""
    torch.manual_seed(1)
    backbone, worst = Backbone(FAMILIES[family]().to(torch.float64)).train(), 0.0
    for seed, documents in enumerate(([17, 1, 30, 8, 12], [40, 3], [2, 9, 31, 7, 16, 5])):
        sequences = sequences_of(documents)
        loss, _, gradients = passed(backbone, sequences)
        of_documents = zip(sequences.tokens.split(documents), sequences.targets.split(documents))
        texts = [TokenSequence(*(each.numpy() for each in both), (), np.array([], int)) for both in of_documents]
        lengths = BatchLengths(
            np.array(documents), np.array([targets_of(text) for text in texts]), HOME[: len(texts)], {}
        )
        decision = Orchestrator({"backbone": Packed()}, num_ranks, ["backbone"]).decide(lengths)
        decision = cut_at_random(decision, lengths, np.random.default_rng(seed), (2, 1, 4), idle=seed % 2)
        own = decision.sequences_on(rank)
        batch = assemble(decision, lengths, rank, [texts[i] for i in own], {}).sharing(lambda _: dist.group.WORLD)
        own_loss, _, own_gradients = passed(backbone, batch.sequences, own)
        dist.all_reduce(own_loss)
        worst = max(worst, (own_loss - loss).abs().item() / loss.abs().item())
        for name, gradient in own_gradients.items():
            dist.all_reduce(gradient)
            worst = max(worst, (gradient - gradients[name]).abs().max().item())
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_some_documents_are_shared_and_others_whole(family):
    assert max(run_ranks(errors_beside_whole_documents, 4, family)) < 1e-10


@pytest.mark.parametrize("head_groups", [1, 2])
def test_group_cast_moves_no_row_that_is_not_seen(head_groups):
    """Keys and values of two layers, each forward and, as gradients, backward; rows of 2 heads of 4 in float64."""
    of_ranks = run_ranks(errors, 2, "llama", ("group_cast", "all_gather"), head_groups)
    for lengths in ([17, 1, 30, 8], [64]):
        rows, table = context_rows(np.array(lengths), 2), AttentionTable.packed(lengths)
        seen = [table.of(own, table.keys).seen for own in rows.rows]
        needed = sum(int((rows.owner[keys] != rank).sum()) for rank, keys in enumerate(seen))
        row_bytes = 2 * (2 * 2 * 4) * 8 * 2
        sent = {way: sum(found[way, tuple(lengths)][1] for found in of_ranks) for way in ("group_cast", "all_gather")}
        assert sent["group_cast"] == needed * row_bytes < sent["all_gather"] == rows.num_rows * row_bytes


def test_what_ranks_want_is_made_once_for_each_window(monkeypatch):
    """For 64 k tokens it takes 13 ms of the host; a method is chosen by it, and keys are sent by it."""
    made = []
    wanted = ContextRows.wanted
    monkeypatch.setattr(ContextRows, "wanted", lambda rows, table: made.append(table) or wanted(rows, table))
    share = SimpleNamespace(rows=context_rows(np.array([40, 30]), 2), num_whole=0, rank=1, method="auto", group=None)
    items = ContextItems(share)
    for window in (None, 7, None, 7):
        assert items.method_for(2, 2, window) == "group_cast"
        items._keys_for(window, False, torch.device("cpu"))
    assert len(made) == 2
