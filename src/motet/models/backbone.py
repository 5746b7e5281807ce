"""A causal LM from transformers on packed documents whose placeholders are replaced by encoder rows.

The families of the registry need nothing of their own here: embedding, `model(inputs_embeds=...)` and head are the
same. Gemma multiplies embeddings of tokens, and not encoder rows, as transformers' own multimodal models do it. Every
other class, and what a config says beyond that, is refused. The packed attention reaches the layers as the keyword
argument `segments`; with `use_cache=False` and no mask (every other combination silently attends across documents),
positions restart with each document.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from motet.core.shapes import Transformer, embedding, final_norm, head
from motet.core.spec import Module
from motet.core.workload import BACKBONE
from motet.models.attention import ATTENTION, PackedItems
from motet.models.block import Block, outside_blocks, pass_through, wrap_blocks
from motet.models.contract import Sequences
from motet.models.exact import keep_float64
from motet.models.families.registry import backbone_family
from motet.models.families.understood import check_backbone, reads
from motet.models.layers import LayerModules, any_trainable, frozen_to_eval
from motet.models.rotary import choose_by_document

_LOGITS_AT_ONCE = 2**28
"""Logits that are in memory at a time, 1 GiB in float32; a long pack with a large vocabulary has many times as many."""


class Backbone(nn.Module):
    """One unit whose forward does everything from tokens to loss, so that it can be the root of sharding.

    causal_lm: an HF model of a class in `registry.BACKBONES`, built with attn_implementation="motet_packed". Raises
    UserError for another class, and for a config that says what is not computed (`understood.check_backbone`).
    before_backbone(embeds [total, dim], sequences) -> embeds: a special merge, say; not called without sequences.
    """

    def __init__(
        self,
        causal_lm: nn.Module,
        train: bool = True,
        before_backbone: Callable[[Tensor, Sequences], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if causal_lm.config._attn_implementation != ATTENTION:
            raise ValueError(f"{type(causal_lm).__name__} must be built with attn_implementation={ATTENTION!r}")
        self._norm = backbone_family(causal_lm).norm
        check_backbone(causal_lm.config, f"{type(causal_lm).__name__}: ")
        choose_by_document(causal_lm)
        keep_float64(causal_lm)
        if not train:
            causal_lm.requires_grad_(False)
        self.causal_lm = causal_lm
        self.before_backbone = before_backbone
        self._blocks = tuple(wrap_blocks(causal_lm, causal_lm.model.layers))
        frozen_to_eval(causal_lm)

    def train(self, mode: bool = True) -> Backbone:
        """As torch's, but a causal LM without anything to train stays in eval mode (`frozen_to_eval`)."""
        super().train(mode)
        frozen_to_eval(self.causal_lm)
        return self

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The decoder layers in execution order: the units of sharding and recomputation."""
        return self._blocks

    @property
    def dim(self) -> int:
        return self.causal_lm.config.hidden_size

    @property
    def trainable(self) -> bool:
        """Whether the backbone has trainable parameters; it takes part in backward also if only an encoder has."""
        return any(p.requires_grad for p in self.parameters())

    def layers(self) -> list[LayerModules]:
        """In execution order, from tokens to logits."""
        model, hidden, vocab_size = self.causal_lm.model, self.dim, self.causal_lm.config.vocab_size
        table, output = model.embed_tokens, self.causal_lm.lm_head
        tied = output.weight is table.weight
        return [
            LayerModules(embedding(vocab_size, hidden, trainable=any_trainable(table)), (table,)),
            *(
                LayerModules(self._shape(block).layer(trainable=any_trainable(block)), (block,))
                for block in self._blocks
            ),
            LayerModules(final_norm(hidden, self._norm, trainable=any_trainable(model.norm)), (model.norm,)),
            LayerModules(head(vocab_size, hidden, tied=tied, trainable=any_trainable(output)), (output,)),
        ]

    def _shape(self, block: Block) -> Transformer:
        config, attention, mlp = self.causal_lm.config, block.self_attn, block.mlp
        # Phi3 has one product for queries, keys and values, and one for both factors of the MLP.
        fused = getattr(attention, "qkv_proj", None)
        products = {
            "query": fused or attention.q_proj,
            "key": fused or attention.k_proj,
            "value": fused or attention.v_proj,
            "output": attention.o_proj,
            "mlp": getattr(mlp, "gate_up_proj", None) or mlp.up_proj,
        }
        normed = getattr(attention, "q_norm", None)
        by_head = normed is not None and normed.weight.numel() == attention.head_dim
        return Transformer(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            gated=True,
            activation=config.hidden_activation if reads(config, "hidden_activation") else config.hidden_act,
            norm=self._norm,
            num_norms=sum(name.endswith("norm") for name, _ in block.inner.named_children()),
            biases=tuple(name for name, product in products.items() if product.bias is not None),
            qk_norm=by_head,
            qk_norm_rows=normed is not None and not by_head,
            causal=True,
            window=self._window(attention) or 0,
        )

    def _window(self, attention: nn.Module) -> int | None:
        """Qwen and Gemma3 decide it by layer, Mistral and Phi3 for all layers; the others have none."""
        config = self.causal_lm.config
        of_all = config.sliding_window if reads(config, "sliding_window") else None
        return getattr(attention, "sliding_window", of_all)

    def spec_module(self, name: str = BACKBONE) -> Module:
        """What the backbone is, for all that is computed from shapes."""
        return Module.of(name, (each.layer for each in self.layers()))

    def forward(
        self, sequences: Sequences, features: dict[str, Tensor], predict: bool = False
    ) -> tuple[Tensor, int] | Tensor:
        """features: per encoder [rows, dim], for the places sequences.feature_positions[name].

        Returns (cross entropy summed over targets, float32 or float64; number of targets): the sum, not the mean,
        because only the caller knows the number of targets on all ranks. With `predict`: the likeliest next token of
        each sequence, int64 [num_sequences].
        """
        hidden = self._hidden(sequences, features)
        if predict:
            last = sequences.offsets[1:].to(hidden.device, torch.int64) - 1
            return self.causal_lm.lm_head(hidden[last]).argmax(-1)
        rows = _predicted_rows(sequences).to(hidden.device)
        if len(hidden) == 0:
            return hidden.sum(dtype=torch.promote_types(hidden.dtype, torch.float32)), 0
        return self.loss(hidden[rows - 1], sequences.tokens[rows]), len(rows)

    def next_tokens(self, sequences: Sequences, features: dict[str, Tensor]) -> Tensor:
        """The likeliest next token of each sequence, int64 [num_sequences]; by way of forward, where FSDP hooks in."""
        with torch.no_grad():
            return self(sequences, features, predict=True)

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Cross entropy of predicting `tokens` [n] from `hidden` [n, dim], summed."""
        at_once = max(1, _LOGITS_AT_ONCE // self.causal_lm.config.vocab_size)
        if len(tokens) <= at_once:
            return self._part_loss(hidden, tokens)
        parts = zip(hidden.split(at_once), tokens.split(at_once), strict=True)
        losses = [checkpoint(self._part_loss, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        return torch.stack(losses).sum()

    def _part_loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        logits = self.causal_lm.lm_head(hidden)
        return cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), tokens, reduction="sum")

    def _hidden(self, sequences: Sequences, features: dict[str, Tensor]) -> Tensor:
        """Hidden states after the last norm, [total, dim]."""
        empty = len(sequences.tokens) == 0
        table = self.causal_lm.get_input_embeddings()
        embeds = table.weight.new_zeros(0, self.dim) if empty else table(sequences.tokens)
        if empty:
            embeds = pass_through(embeds, outside_blocks(self))
        for name in sorted(features):
            rows = features[name].to(embeds.dtype)
            places = sequences.feature_positions.get(name)
            if places is None:
                places = torch.empty(0, dtype=torch.int64, device=embeds.device)
            if len(places) != len(rows):
                raise ValueError(f"{len(rows)} feature rows of {name!r} for {len(places)} places in the sequences")
            # Also without rows: the features then stay in the graph, and every rank runs the same backward.
            embeds = embeds.index_copy(0, places, rows)
        if torch.is_grad_enabled() and not embeds.requires_grad:
            # Decided alike on every rank: with a frozen backbone, a rank without media must run backward all the same.
            embeds.requires_grad_()
        if empty:
            for block in self._blocks:
                embeds = block(embeds)
            return embeds
        if self.before_backbone:
            embeds = self.before_backbone(embeds, sequences)
        segments = PackedItems(sequences.offsets.numpy(), causal=True)
        positions = np.arange(len(embeds)) - np.repeat(segments.offsets[:-1], segments.lengths)
        return self.causal_lm.model(
            inputs_embeds=embeds[None],
            position_ids=torch.from_numpy(positions).to(embeds.device)[None],
            use_cache=False,
            segments=segments,
        ).last_hidden_state[0]


def _predicted_rows(sequences: Sequences) -> Tensor:
    """Places of the targets, int64 [num_targets]; the first token of a document has nothing to be predicted from."""
    predicted = sequences.targets.clone()
    starts = sequences.offsets[:-1].long()
    predicted[starts[starts < len(predicted)].to(predicted.device)] = False
    return predicted.nonzero()[:, 0]
