"""A causal LM from transformers on packed documents in which encoder rows replace placeholders.

All families of the registry share this code: embedding, `model(inputs_embeds=...)`, head. Gemma scales the embeddings
of tokens and not the encoder rows, as in transformers' own multimodal models. Every other class, and every config with
further options, is refused.

The layers get the extents of the documents as the keyword argument `segments`, with `use_cache=False` and without a
mask: every other combination silently attends across documents. Positions restart with each document.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from motet.absent import take_part
from motet.ahead import found
from motet.core.arrays import Int64Array
from motet.core.attention_table import AttentionTable
from motet.core.errors import UserError
from motet.core.grid_positions import BEHIND_SIDE, NUM_AXES
from motet.core.sight import Sight
from motet.core.spec import Module
from motet.core.workload import BACKBONE
from motet.dropout import ENTER, MERGE, ItemRows, arranged
from motet.models.asked import Asked, attention_of, dropout_of, has_scores
from motet.models.attention import ATTENTION, PackedItems
from motet.models.backbone_layers import backbone_layers, shape_of
from motet.models.block import Block, outside_blocks, wrap_blocks
from motet.models.callbacks import callback_name, check_callback
from motet.models.context_items import ContextItems, KeysHere, SharedMerge, SharedRows, context_of, placed, spare_row
from motet.models.contract import Sequences, on_host
from motet.models.exact import keep_float64
from motet.models.experts import ROUTER_LOSS, use_routed_experts
from motet.models.extents import runs_together
from motet.models.families.registry import backbone_family
from motet.models.families.shaped import ShapedCausalLM
from motet.models.families.supported import check_backbone
from motet.models.families.text import TextModel
from motet.models.key_items import KeyItems
from motet.models.layers import LayerModules, frozen_to_eval, weighted_callbacks
from motet.models.merge import added_at, merge_rows, places_of
from motet.models.merge_kept import kept_of_merge
from motet.models.rotary import document_lengths, use_document_rotary
from motet.models.router_loss import RouterLoss
from motet.models.table_items import TableItems
from motet.on_device import on_device
from motet.tensor_parallel import RowParts, TensorRanks, copied, likeliest_entry, vocabulary_cross_entropy

_T = TypeVar("_T")

_QUERY_STD = 0.02
"""Of query tokens before they are trained, as of embeddings in transformers."""
_MAX_LOGITS = 2**28
"""The number of logits in memory at a time: 1 GiB in float32. A long pack has many times as many."""


class Backbone(nn.Module):
    """A causal LM from tokens to loss in one forward, so that it can be the root of sharding.

    causal_lm: an HF model of a class in `registry.BACKBONES`, or a `ShapedCausalLM`, built with
               attn_implementation="motet_packed".
    merge: a callback in place of `merge_rows` (`models/callbacks.py`).
    again: encoder -> blocks, not the first, before which its rows are added to the hidden states at their places again,
           as DeepStack does.
    stacked: encoder -> n: n + 1 rows of it stand side by side as one wide row, of which the first enters as rows of
             others do, and each other one is added before the next block, 1 to n (Qwen3-VL's DeepStack).
    keys:    encoder -> n: an item's row is n rows side by side, which are no rows of the sequence, but keys of some
             layers (`models/key_items.py`). The item's token is a token like others.
    bidirectional: encoders whose rows see each other in both directions, as images do in Gemma 3: rows that follow each
           other without a token between.
    prefix: whether rows of a document before its first target see each other in both directions, as in PaliGemma. No
            window hides one of them from another, as in PaliGemma 2.
    queries: generator -> learned query tokens of each item that it is to make; they stand at the item's rows, and the
           hidden states there are what the generator is given.
    turns: generators that are given the hidden states of a turn's own rows.
    first_position: of the first row of each document.

    norm: which norm its layers have, as in `core.shapes`.
    Raises UserError for another class, and for a config with options that Motet does not compute
    (`supported.check_backbone`).
    """

    def __init__(
        self,
        causal_lm: nn.Module,
        train: bool = True,
        merge: Callable[[Tensor, dict[str, Tensor], Sequences], Tensor] | None = None,
        again: Mapping[str, Sequence[int]] = MappingProxyType({}),
        stacked: Mapping[str, int] = MappingProxyType({}),
        keys: Mapping[str, int] = MappingProxyType({}),
        bidirectional: Sequence[str] = (),
        prefix: bool = False,
        queries: Mapping[str, int] = MappingProxyType({}),
        turns: Sequence[str] = (),
        first_position: int = 0,
    ) -> None:
        super().__init__()
        self.bidirectional, self.prefix = tuple(bidirectional), prefix
        self.first_position = first_position
        if causal_lm.config._attn_implementation != ATTENTION:
            raise ValueError(f"{type(causal_lm).__name__} must be built with attn_implementation={ATTENTION!r}")
        shaped = isinstance(causal_lm, ShapedCausalLM)
        self.norm = causal_lm.shape.norm if shaped else backbone_family(causal_lm).norm
        self.reads_grids = not shaped and backbone_family(causal_lm).reads_grids
        self.behind_grids = BEHIND_SIDE if shaped else backbone_family(causal_lm).behind_grids
        check_backbone(causal_lm.config, f"{type(causal_lm).__name__}: ")
        self._text = (TextModel if shaped else backbone_family(causal_lm).text)(causal_lm)
        says_tied = getattr(causal_lm, "_tied_weights_keys", None) and causal_lm.config.tie_word_embeddings
        if says_tied and not self._text.is_tied:
            raise UserError(
                f"{type(causal_lm).__name__}: its config says tie_word_embeddings, but its output layer has weights of "
                "its own, which an export would lose; set tie_word_embeddings = false in config.json, or in "
                "model.backbone.config."
            )
        if use_document_rotary(causal_lm) and first_position:
            raise UserError(
                f"first_position is {first_position}; beside rotary positions of type longrope or dynamic, whose "
                "frequencies follow from a document's length, it must be 0."
            )
        num_routed = 0 if shaped else use_routed_experts(self._text.layers)
        # As in transformers, which does not read the coefficient otherwise.
        balances = num_routed and causal_lm.config.output_router_logits
        self._balance_weight = causal_lm.config.router_aux_loss_coef / num_routed if balances else 0.0
        keep_float64(causal_lm)
        if not train:
            causal_lm.requires_grad_(False)
        self.causal_lm = causal_lm
        dtype = next(p.dtype for p in causal_lm.parameters() if p.is_floating_point())
        self.queries = nn.ParameterDict(
            {name: nn.Parameter(_QUERY_STD * torch.randn(count, self.dim).to(dtype)) for name, count in queries.items()}
        )
        self.turns = tuple(turns)
        self.row_parts: RowParts | None = None  # On tensor-parallel ranks (`divided.py`).
        self._asked_before: dict[tuple[int, torch.device, torch.dtype], tuple[bool, Asked]] = {}
        self.merge = merge
        self.encoders: tuple[str, ...] = ()  # Of the model: their rows are merged.
        self._kept_of_merge: tuple[Any, tuple[str, ...], int | None] = None, (), None
        if merge is not None:
            check_callback("merge", "merge", merge)
        self._blocks = tuple(wrap_blocks(causal_lm, self._text.layers))
        self.stacked = dict(stacked)
        self.again = {name: tuple(blocks) for name, blocks in again.items()}
        self.again |= {name: tuple(range(1, count + 1)) for name, count in self.stacked.items()}
        self.keys = dict(keys)
        self.again |= dict.fromkeys(self.keys, self._text.crossing)
        for name, blocks in self.again.items():
            if wrong := [block for block in blocks if not 0 < block < len(self._blocks)]:
                raise UserError(
                    f"again: {name!r} enters before block {wrong[0]}; it must be a block from 1 to "
                    f"{len(self._blocks) - 1}, as its rows enter before block 0 in any case."
                )
        frozen_to_eval(causal_lm, *weighted_callbacks(merge))

    def train(self, mode: bool = True) -> Backbone:
        """`nn.Module.train`, except that a causal LM, or a merge, whose weights are all frozen stays in eval mode."""
        super().train(mode)
        frozen_to_eval(self.causal_lm, *weighted_callbacks(self.merge))
        return self

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The decoder layers in execution order; each is sharded and recomputed by itself."""
        return self._blocks

    @property
    def dim(self) -> int:
        """Width of the hidden states."""
        return self.causal_lm.config.hidden_size

    @property
    def trainable(self) -> bool:
        """Whether the backbone has trainable parameters; a frozen backbone still runs backward for its encoders."""
        return any(p.requires_grad for p in self.parameters())

    def row_width(self, encoder: str) -> int:
        """Width of the rows that an encoder gives."""
        return self.dim * self.keys.get(encoder, 1 + self.stacked.get(encoder, 0))

    def _part(self, encoder: str, rows: Tensor, block: int) -> Tensor:
        """What of an encoder's rows enters before a block, [rows, dim]."""
        return rows[:, block * self.dim : (block + 1) * self.dim] if encoder in self.stacked else rows

    def layers(self) -> list[LayerModules]:
        """The layers in execution order, from tokens to logits."""
        return backbone_layers(self)

    @property
    def text(self) -> TextModel:
        """Where the parts of the causal LM are."""
        return self._text

    @property
    def kept_of_merge(self) -> int | None:
        """Elements of a row that a merge of the user's own keeps (`merge_kept.py`); None where that is not known."""
        key = self.merge, self.encoders
        if self.merge is not None and self._kept_of_merge[:2] != key:
            merged = [name for name in self.encoders if name not in self.keys]
            self._kept_of_merge = *key, kept_of_merge(self.merge, self.dim, merged)
        return self._kept_of_merge[2]

    @property
    def max_rows(self) -> int | None:
        """The longest sequence that there are positions for; None where no table bounds it."""
        count = self._text.num_positions
        return None if count is None else count - self.first_position

    @property
    def needs_places(self) -> bool:
        """Whether each block needs to know where rows stand: rows see some that stand behind them, or their positions
        are those of a grid.
        """
        return self.prefix or bool(self.bidirectional) or self.reads_grids

    @property
    def sight(self) -> Sight:
        """What rows of sequences see in its layers."""
        return Sight.of(self.spec_module().layers, self.bidirectional, self.prefix)

    @property
    def places_items(self) -> bool:
        """Whether sequences must say what raster the rows of items are, or how many of them text sees."""
        return self.reads_grids or bool(self.keys)

    def spec_module(self, name: str = BACKBONE) -> Module:
        """The backbone's part of a ModelSpec."""
        return Module.of(name, (each.layer for each in self.layers()))

    def forward(
        self, sequences: Sequences, features: dict[str, Tensor], predict: bool = False
    ) -> tuple[Tensor, int] | tuple[Tensor, int, dict[str, Tensor]] | Tensor:
        """features: per encoder [rows, dim], which stand at sequences.feature_positions[name].

        Returns (cross entropy summed over targets, float32 or float64; number of targets). It is the sum, not the mean,
        because only the caller knows the number of targets on all ranks. If there are generators, a third entry has
        the hidden states at the queries of each, or of the turns that it reads: [its rows, dim], in the order of its
        feature positions. With `predict` it returns the likeliest next token of each sequence, int64 [num_sequences].
        """
        if predict:
            return self.likeliest(self.hidden_states(sequences, features), sequences)
        router_loss = self.router_loss(sequences)
        hidden = self.hidden_states(sequences, features, router_loss)
        loss, num_targets = self.leave(hidden, sequences)
        loss = loss if router_loss is None else router_loss.added_to(loss)
        return (loss, num_targets, self.conditions(hidden, sequences)) if self.gives else (loss, num_targets)

    @property
    def gives(self) -> tuple[str, ...]:
        """The generators that are given hidden states."""
        return (*self.queries, *self.turns)

    def conditions(self, hidden: Tensor, sequences: Sequences) -> dict[str, Tensor]:
        """What each generator is given of hidden states behind the norm, [total, dim]: [rows, dim]."""
        return {name: self.condition(name, hidden, sequences) for name in self.gives}

    def condition(self, name: str, hidden: Tensor, sequences: Sequences) -> Tensor:
        """What one generator is given of hidden states behind the norm, [total, dim]: [rows, dim].

        Where ranks share sequences, of the items that this rank gives it; a collective then, if there are any.
        """
        rows, context = hidden[self._places(name, sequences)], context_of(sequences)
        return rows if context is None or name not in context.given else context.collected(name, rows)

    @staticmethod
    def _places(name: str, sequences: Sequences) -> Tensor:
        nowhere = torch.empty(0, dtype=torch.int64, device=sequences.tokens.device)
        return sequences.feature_positions.get(name, nowhere)

    def _queries_at(self, name: str, rows: Tensor, sequences: Sequences) -> Tensor:
        """The query tokens [queries, dim] of each item, one item after the other: those that stand on this rank."""
        if (context := context_of(sequences)) is None:
            return rows.repeat(len(self._places(name, sequences)) // len(rows), 1)
        places = self._places(name, context.whole).numpy()
        number = np.flatnonzero(context.rows.owner[places] == context.rank) % len(rows)
        return rows[on_device(number, rows.device)]

    def router_loss(self, sequences: Sequences, gradient: float | None = None) -> RouterLoss | None:
        """The router loss of a pass through layers with experts; None if there is none to compute.

        gradient: that of the sum of the loss, where `through` is called without the loss behind it.
        """
        context, device = context_of(sequences), sequences.tokens.device
        is_empty = not int(sequences.offsets[-1]) if context is None else self._without_rows(sequences)
        if not self._balance_weight or is_empty:
            return None
        whole = sequences if context is None else context.whole
        lengths = whole.offsets.diff().long()
        documents = torch.arange(len(lengths)).repeat_interleave(lengths)
        targets = getattr(whole, "num_targets", None)
        if targets is None:
            is_predicted = _is_predicted(whole).long()
            targets = torch.zeros_like(lengths, device=is_predicted.device)
            targets = targets.index_add(0, on_device(documents, targets.device), is_predicted)
        if context is not None:
            # The last document is that of a spare row.
            own = torch.from_numpy(context.own)
            documents = documents[own] if len(own) else torch.tensor([len(lengths)])
            lengths, targets = (
                torch.cat([each, each.new_tensor([last])]) for each, last in ((lengths, 1), (targets, 0))
            )
        return RouterLoss(
            self._balance_weight,
            *(on_device(each, device) for each in (documents, lengths, targets)),
            summed=None if context is None else partial(_sum_choices, context),
            gradient=gradient,
        )

    @property
    def tensor_ranks(self) -> TensorRanks | None:
        """The tensor-parallel ranks that share the vocabulary; None: this rank has all of it."""
        return None if self.row_parts is None else self.row_parts.ranks

    def likeliest(self, hidden: Tensor, sequences: Sequences) -> Tensor:
        """The likeliest next token of each sequence, int64 [num_sequences]. hidden: as `leave` takes them.

        Where ranks share sequences, of those whose last row is here.
        """
        context = context_of(sequences)
        last = on_device(sequences.offsets[1:].long() - 1, hidden.device) if context is None else context.ends
        logits = self.logits(hidden[last])
        if self.tensor_ranks is not None:
            return likeliest_entry(logits, self.tensor_ranks, self.causal_lm.config.vocab_size)
        return logits.argmax(-1)

    def next_tokens(self, sequences: Sequences, features: dict[str, Tensor]) -> Tensor:
        """The likeliest next token of each sequence, int64 [num_sequences], by forward, which has FSDP's hooks."""
        with torch.no_grad():
            return self(sequences, features, predict=True)

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Cross entropy of predicting `tokens` [n] from `hidden` [n, dim], summed over tokens."""
        if self.tensor_ranks is not None:
            hidden = copied(hidden, self.tensor_ranks)
        part_size = max(1, _MAX_LOGITS // self.causal_lm.config.vocab_size)
        if len(tokens) <= part_size:
            return self._part_loss(hidden, tokens)
        parts = zip(hidden.split(part_size), tokens.split(part_size), strict=True)
        losses = [checkpoint(self._part_loss, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        return torch.stack(losses).sum()

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, dim] behind the norm -> [n, vocab_size], capped where the family caps them (Gemma 2)."""
        logits = self._text.scaled(self.causal_lm.lm_head(hidden))
        cap = getattr(self.causal_lm.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _part_loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        logits = self.logits(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.tensor_ranks is not None:
            return vocabulary_cross_entropy(logits, tokens, self.tensor_ranks, self.causal_lm.config.vocab_size)
        return cross_entropy(logits, tokens, reduction="sum")

    def _merged(self, embeds: Tensor, features: dict[str, Tensor], sequences: Sequences) -> Tensor:
        """The embeddings with the rows of all encoders. A merge of the user's own is called where there are rows."""
        if self.merge is None:
            return merge_rows(embeds, features, sequences)
        embeds = merge_rows(embeds, {name: rows for name, rows in features.items() if not len(rows)}, sequences)
        present = {name: rows for name, rows in features.items() if len(rows)}
        for name, rows in present.items():
            places_of(name, rows, sequences)
        if not present and not (len(embeds) and getattr(self.merge, "takes_text", False)):
            return take_part(embeds, self.merge.parameters()) if isinstance(self.merge, nn.Module) else embeds
        merged = self.merge(embeds, present, sequences)
        given = (merged.shape, merged.dtype) if isinstance(merged, Tensor) else type(merged).__name__
        if given != (embeds.shape, embeds.dtype):
            found = f"{list(given[0])} in {given[1]}" if isinstance(given, tuple) else given
            raise UserError(
                f"merge ({callback_name(self.merge)}) returned {found} where it was given embeddings "
                f"{list(embeds.shape)} in {embeds.dtype}; it must return embeddings for the same places"
            )
        return merged

    def hidden_states(
        self, sequences: Sequences, features: dict[str, Tensor], router_loss: RouterLoss | None = None
    ) -> Tensor:
        """Hidden states after the last norm, [total, dim]. router_loss: takes that of the layers, if given."""
        entered = self.enter(sequences, features)
        return self.through(entered, sequences, 0, len(self._blocks), features, router_loss)

    def enter(self, sequences: Sequences, features: dict[str, Tensor]) -> Tensor:
        """What stands before the blocks: embedded tokens with the features in their places, [total, dim].

        features: as of `forward`. `enter`, `through` and `leave` make up `forward`; a stage of a pipeline calls those
        that it holds.
        """
        context = context_of(sequences)
        # A merge of the user's own takes sequences whole, also those of which other ranks run some rows.
        merging = None if context is None or self.merge is None else context.merging
        here = sequences if merging is None else merging.sequences
        empty = len(here.tokens) == 0
        table = self._text.table
        embeds = table.weight.new_zeros(0, self.dim) if empty else table(here.tokens)
        if empty and self._learns_before_blocks():
            embeds = take_part(embeds, outside_blocks(self))
        features = {name: rows.to(embeds.dtype) for name, rows in features.items()}
        for name, rows in self.queries.items():
            features[name] = self._queries_at(name, rows, here).to(embeds.dtype)
        if context is not None:
            routes = context.routes if merging is None else merging.routes
            names = [name for name in routes if name not in self.keys]
            features |= placed(features, context, names, embeds, self.row_width, to_merge=merging is not None)
        keys = [features.pop(name) for name in self.keys if name in features]
        if absent := [rows for rows in keys if not len(rows)]:
            embeds = take_part(embeds, absent)  # As in a merge: all ranks run the same backward.
        features = {name: self._part(name, rows, 0) for name, rows in features.items()}
        # A rank that merges nothing draws nothing there, and what comes behind as all do.
        with arranged(MERGE, lambda: _rows_of(sequences) if merging is None else [_rows_to_merge(merging)]):
            embeds = self._merged(embeds, features, here)
        if context is not None and merging is not None:
            embeds = context.merged(embeds)
        with arranged(ENTER, lambda: _rows_of(sequences)):
            if len(embeds):
                embeds = self._text.entered(embeds, self._counted(sequences) + self.first_position)
        if torch.is_grad_enabled() and not embeds.requires_grad and not self.trainable:
            # The same on every rank: with a frozen backbone a rank without media must still run backward.
            embeds.requires_grad_()
        return embeds

    def _learns_before_blocks(self) -> bool:
        """Whether embedded rows require a gradient on ranks that have some, so that frozen blocks run backward, too."""
        embedding = {id(parameter) for parameter in self._text.table.parameters()}
        ends = self._text.norm, self.causal_lm.lm_head
        behind = {id(parameter) for end in ends for parameter in end.parameters()} - embedding
        return any(each.requires_grad and id(each) not in behind for each in outside_blocks(self))

    def through(
        self,
        hidden: Tensor,
        sequences: Sequences,
        first: int,
        stop: int,
        features: Mapping[str, Tensor] = MappingProxyType({}),
        router_loss: RouterLoss | None = None,
    ) -> Tensor:
        """Hidden states [total, dim] after the blocks first ... stop - 1; behind the last block also after the norm.

        features: of encoders that enter again before these blocks; others are not read. Of `sequences` it reads the
        offsets alone, the places of these features, and of those that see each other in both directions.
        router_loss: takes the router loss, if given.
        """
        context = context_of(sequences)
        if len(hidden) == 0 and (context is None or self._without_rows(sequences)):
            for block in self._blocks[first:stop]:
                hidden = block(hidden)
            return hidden
        lengths = np.diff(sequences.offsets.numpy().astype(np.int64))
        segments = self._who_sees(sequences)
        if context is None:
            of_rows = np.repeat(lengths, lengths)
            positions = self._positions(sequences, self._counted(sequences).numpy())
        else:
            own, hidden = spare_row(context.own, hidden)
            positions = self._positions(context.whole, context.rows.positions)[..., own]
            of_rows = np.repeat(lengths, lengths)[own]
            again = [name for name, blocks in self.again.items() if any(first <= block < stop for block in blocks)]
            names = [name for name in context.routes if name in again]
            moved = placed(features, context, names, hidden, self.row_width)
            features = {name: features[name] for name in features if name in again} | moved
        with (
            self._only(first, stop),
            self._entering(features, sequences),
            arranged(2 * first, lambda: _rows_of(sequences)),
            document_lengths(self.causal_lm, of_rows),
        ):
            position_ids = on_device(positions + self.first_position, hidden.device).unsqueeze(-2)
            routed = {} if router_loss is None else {ROUTER_LOSS: router_loss}
            if any(first <= number < stop for number in self._text.crossing):
                routed |= self._crossing(hidden, features, sequences)
            passed = self._through(hidden, position_ids=position_ids, segments=segments, **routed)
        return passed if context is None else passed[: len(context.own)]

    def _who_sees(self, sequences: Sequences) -> PackedItems | TableItems | ContextItems:
        """The extents of the documents: made once for all passes of a microbatch."""

        def made() -> PackedItems | TableItems | ContextItems:
            context = context_of(sequences)
            together = runs_together(sequences if context is None else context.whole, self.bidirectional, self.prefix)
            if context is not None:
                return ContextItems(context, together, prefix=self.prefix, head_groups=context.head_groups)
            offsets = sequences.offsets.numpy().astype(np.int64)
            if not len(together):
                return PackedItems(offsets, causal=True)
            return TableItems(AttentionTable.packed(np.diff(offsets), together=together, prefix=self.prefix))

        return _found("documents", sequences, made)

    def make_ahead(
        self, sequences: Sequences, blocks: Collection[int], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make what attention of some blocks asks of the host for sequences, before a pass through them asks for it.

        sequences: on the host. device, dtype: on which and in which the blocks compute. Not a collective.
        """
        if context_of(sequences) is None and not int(sequences.offsets[-1]):
            return
        segments = self._who_sees(sequences)
        for is_crossing, asked in {self._asked(block, device, dtype) for block in blocks}:
            if not is_crossing:
                segments.make_ahead(asked)
            for name, num_rows in self.keys.items() if is_crossing else ():
                self._keys_seen(name, num_rows, sequences).make_ahead(asked)

    def _asked(self, number: int, device: torch.device, dtype: torch.dtype) -> tuple[bool, Asked]:
        """Whether a block attends to keys of items, and what its attention asks. It is read off the block once."""
        key = number, device, dtype
        if key not in self._asked_before:
            self._asked_before[key] = number in self._text.crossing, self._asked_by(number, device, dtype)
        return self._asked_before[key]

    def _asked_by(self, number: int, device: torch.device, dtype: torch.dtype) -> Asked:
        block, size = self._blocks[number], 1 if self.tensor_ranks is None else self.tensor_ranks.size
        shape, attention = shape_of(self, block), attention_of(block)
        heads = shape.num_heads // size, (shape.num_kv_heads or shape.num_heads) // size
        rate, is_scored = (0.0, False) if attention is None else (dropout_of(attention), has_scores(attention))
        return Asked(device, dtype, *heads, shape.head_width, shape.window or None, rate, is_scored)

    def _crossing(self, hidden: Tensor, features: Mapping[str, Tensor], sequences: Sequences) -> dict[str, Any]:
        """What layers that attend to keys are given of them: the keys, [1, keys, dim], and which rows see which."""
        arguments: dict[str, Any] = {}
        context = context_of(sequences)
        for name, num_rows in self.keys.items():
            rows = features.get(name, hidden.new_zeros(0, self.row_width(name))).to(hidden.dtype)
            if context is not None and name in (context.trained or ()) and torch.is_grad_enabled():
                rows.requires_grad_()  # Ranks meet in backward, too, also one that no row has come to.
            if context is None:
                places_of(name, rows, sequences)  # There are as many places.
            items = self._keys_seen(name, num_rows, sequences)
            if isinstance(items, KeysHere):
                rows, items = items.of(rows), items.items
            arguments |= {"cross_attention_states": rows.reshape(1, -1, self.dim), "cross_attention_mask": items}
        return arguments

    def _keys_seen(self, name: str, num_rows: int, sequences: Sequences) -> KeyItems | KeysHere:
        """Which rows of an encoder's items the documents see: made once for all passes of a microbatch.

        num_rows: of each item.
        """

        def made() -> KeyItems | KeysHere:
            context = context_of(sequences)
            whole = on_host(sequences) if context is None else context.whole
            nowhere = torch.empty(0, dtype=torch.int64)
            places = whole.feature_positions.get(name, nowhere).cpu().numpy()
            num_seen = whole.key_rows[places].numpy() if len(places) else places  # None where there is no item.
            items = KeyItems.packed(whole.offsets.numpy().astype(np.int64), places, num_seen, num_rows)
            return items if context is None else KeysHere(items, places, context)

        return _found(("keys", name), sequences, made)

    def _without_rows(self, sequences: Sequences) -> bool:
        """Whether this replica takes part in the experts of others alone: then no rank shares sequences with it."""
        return not int(sequences.offsets[-1]) and any(block.without_rows is not None for block in self._blocks)

    @staticmethod
    def _counted(sequences: Sequences) -> Tensor:
        """The positions of the rows that are here, from 0 in each document, int64 [total]."""
        if (context := context_of(sequences)) is not None:
            return torch.from_numpy(context.rows.positions[context.own])
        offsets = sequences.offsets.long()
        return torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(offsets.diff())

    def _positions(self, sequences: Sequences, counted: Int64Array) -> Int64Array:
        """The positions of rows, int64 [total], or [3, total] where they are those of a grid.

        counted: from 0 in each document. Raises ValueError where items stand without their grids.
        """
        if not self.reads_grids:
            return counted
        found = getattr(sequences, "grid_positions", None)
        if found is None and any(len(places) for places in sequences.feature_positions.values()):
            raise ValueError("the rows of items have no grid, and the backbone's positions are those of a grid")
        return np.broadcast_to(counted, (NUM_AXES, len(counted))).copy() if found is None else found.numpy()

    def _through(self, hidden: Tensor, **arguments: Any) -> Tensor:
        """HF's layers on rows [total, dim]. Tensor-parallel ranks have a part of them each, unless layers are to see
        all: where rows are added before a block.
        """

        def layers(rows: Tensor) -> Tensor:
            return self._text.through(rows[None], **arguments)[0]

        if self.row_parts is None or any(block.entering for block in self._blocks):
            return layers(hidden)
        return self.row_parts.in_parts(layers, hidden)

    def leave(self, hidden: Tensor, sequences: Sequences) -> tuple[Tensor, int]:
        """What stands behind the blocks and the norm: the loss and the number of targets, as `forward` returns them."""
        if len(hidden) == 0:
            hidden = take_part(hidden, outside_blocks(self))
            return hidden.sum(dtype=torch.promote_types(hidden.dtype, torch.float32)), 0
        if (context := context_of(sequences)) is not None:
            return self.loss(hidden[context.predicted], context.labels), len(context.labels)
        rows = on_device(_predicted_rows(sequences), hidden.device)
        return self.loss(hidden[rows - 1], sequences.tokens[rows]), len(rows)

    @contextmanager
    def _entering(self, features: Mapping[str, Tensor], sequences: Sequences) -> Iterator[None]:
        """In the block, rows of encoders that enter again are added before their blocks."""

        def add(name: str, number: int, inner: Callable[[Tensor], Tensor] | None, hidden: Tensor) -> Tensor:
            """hidden [1, total, dim]. inner: of another encoder that enters before the same block."""
            rows = self._part(name, features[name], number).to(hidden.dtype)
            hidden = hidden if inner is None else inner(hidden)
            return added_at(hidden, places_of(name, rows, sequences), rows)

        added = [name for name in features if name not in self.keys]
        entered = [(name, block) for name in added for block in self.again.get(name, ())]
        for name, number in entered:
            block = self._blocks[number]
            block.entering = partial(add, name, number, block.entering)
        try:
            yield
        finally:
            for _, number in entered:
                self._blocks[number].entering = None

    @contextmanager
    def _only(self, first: int, stop: int) -> Iterator[None]:
        """In the block, the HF model runs these blocks alone, and its last norm only behind the last of all blocks.

        All blocks stay in the HF model: it reads of each what its layer's attention needs, by the layer's number.
        """
        text, norm = self._text, self._text.norm
        for number, block in enumerate(self._blocks):
            block.skipped = not first <= number < stop
        if stop < len(self._blocks):
            setattr(text.decoder, text.norm_name, nn.Identity())
        try:
            yield
        finally:
            setattr(text.decoder, text.norm_name, norm)
            for block in self._blocks:
                block.skipped = False


def _found(what: Hashable, sequences: Sequences, make: Callable[[], _T]) -> _T:
    """What is made of sequences, once for all passes of a microbatch, which all have these offsets."""
    offsets = sequences.offsets
    return found((what, id(offsets)), lambda: (offsets, make()))[1]


def _rows_to_merge(merging: SharedMerge) -> ItemRows:
    """The rows of the sequences that this rank merges."""
    offsets = merging.sequences.offsets.numpy().astype(np.int64)
    row = np.arange(len(merging.item)) - np.repeat(offsets[:-1], np.diff(offsets))
    return ItemRows(merging.item, row)


def _rows_of(sequences: Sequences) -> list[Int64Array | ItemRows]:
    """The rows of sequences as tensors of the backbone have them, for `arranged`: this rank's, if others have some."""
    lengths = np.diff(sequences.offsets.numpy()).astype(np.int64)
    if (context := context_of(sequences)) is None or not lengths.sum():
        return [lengths]
    own, item = context.own, np.repeat(np.arange(len(lengths)), lengths)
    own = own if len(own) else np.zeros(1, dtype=np.int64)  # The spare row.
    return [ItemRows(item[own], context.rows.positions[own]), lengths]


@torch.no_grad()
def _sum_choices(context: SharedRows, choices: Tensor) -> None:
    """Sum how often experts were chosen in documents over the ranks that share them, in place. A collective.

    choices: int64 [num_documents + 1, num_experts], of which the first are not shared, and the last is nobody's.
    """
    shared = choices[context.num_whole : -1]
    everywhere = choices.new_zeros(context.num_shared, choices.shape[1])
    numbers = on_device(context.numbers, choices.device)
    everywhere[numbers] = shared
    num_ranks = dist.get_world_size(context.group)
    context.count_bytes(2 * everywhere.nbytes * (num_ranks - 1) / num_ranks)
    dist.all_reduce(everywhere, group=context.group)
    shared.copy_(everywhere[numbers])


def _is_predicted(sequences: Sequences) -> Tensor:
    """Which rows are targets, bool [total], on the host if it has them; first tokens of documents are none, as nothing
    predicts them.
    """
    predicted = on_host(sequences).targets.clone()
    starts = sequences.offsets[:-1].long()
    predicted[on_device(starts[starts < len(predicted)], predicted.device)] = False
    return predicted


def _predicted_rows(sequences: Sequences) -> Tensor:
    """Positions of the targets, int64 [num_targets]."""
    return _is_predicted(sequences).nonzero()[:, 0]
