"""Where the parts of a causal LM of transformers are, and what its class does before its layers and behind its output.

Most families have Llama's names. Granite scales rows and logits. GPT-2 and OPT add a learned row for each position. A
document's rows count from 0, so that what is packed beside it changes nothing; none is longer than the table.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from motet.core.errors import UserError
from motet.core.shapes import BIASES, Transformer
from motet.models.block import is_changed, is_compiled
from motet.on_device import on_device
from motet.transposed import TransposedLinear


class TextModel:
    """A causal LM with Llama's names. Subclasses say what is otherwise.

    norm_name: of the last norm in the decoder. position_offset: rows of the position table before that of position 0.
    """

    norm_name: ClassVar[str] = "norm"
    position_offset: ClassVar[int] = 0

    def __init__(self, causal_lm: nn.Module) -> None:
        self.causal_lm: Any = causal_lm

    @property
    def decoder(self) -> Any:
        """The module that has the layers."""
        return self.causal_lm.model

    @property
    def table(self) -> Any:
        """The embedding of tokens."""
        return self.decoder.embed_tokens

    @property
    def is_tied(self) -> bool:
        """Whether the output layer has the weights of the tokens' table."""
        return self.causal_lm.lm_head.weight is self.table.weight  # type: ignore[no-any-return]

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.decoder.layers

    @property
    def crossing(self) -> tuple[int, ...]:
        """The layers that attend to keys, which are no rows of the sequence."""
        return ()

    @property
    def norm(self) -> Any:
        """The last norm."""
        return getattr(self.decoder, self.norm_name)

    @property
    def positions(self) -> Any:
        """The table of learned positions; None where layers turn queries and keys."""
        return None

    @property
    def num_positions(self) -> int | None:
        """The rows that a document may have; None where no table bounds them."""
        return None if self.positions is None else self.positions.num_embeddings - self.position_offset

    def entered(self, rows: Tensor, positions: Tensor) -> Tensor:
        """What the layers are given of merged rows [total, dim]. positions: int64 [total].

        Raises UserError for a position that the table does not have.
        """
        if self.positions is None:
            return rows
        table = self.positions.weight[self.position_offset :]
        if len(positions) and (last := int(positions.max())) >= len(table):
            raise UserError(
                f"a sequence of {last + 1} rows is longer than the {len(table)} that its backbone has positions for; "
                f"set data.max_sequence_length to {len(table)} at most"
            )
        return rows + nn.functional.embedding(on_device(positions, rows.device), table).to(rows.dtype)

    def through(self, hidden: Tensor, position_ids: Tensor, **arguments: Any) -> Tensor:
        """The layers and the last norm on rows [1, total, dim]. arguments: of each layer."""
        if self.positions is None:
            return self.decoder(
                inputs_embeds=hidden, position_ids=position_ids, use_cache=False, **arguments
            ).last_hidden_state
        for layer in self.layers:  # transformers' decoder would add the positions once more.
            hidden = layer(hidden, **arguments)
        return self.norm(hidden)

    def scaled(self, logits: Tensor) -> Tensor:
        """What the class makes of its output layer's product."""
        return logits

    def shape(self, layer: nn.Module) -> Transformer | None:
        """The shape of a layer; None: it is read of Llama's names."""
        return None


class GraniteText(TextModel):
    """Granite: Llama, with rows multiplied before the layers, rows of encoders too, and logits divided.

    transformers' decoder multiplies what it is given. It is called for each part of the layers here, so it must not.
    """

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__(causal_lm)
        self.decoder.embedding_multiplier = 1.0

    def entered(self, rows: Tensor, positions: Tensor) -> Tensor:
        return rows * self.causal_lm.config.embedding_multiplier

    def scaled(self, logits: Tensor) -> Tensor:
        return logits / self.causal_lm.config.logits_scaling


class GPT2Text(TextModel):
    """GPT-2: products stored the other way round, and dropout before the layers.

    transformers' Conv1D becomes a linear layer with the same parameters, but where something is hung on it.
    """

    norm_name = "ln_f"

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__(causal_lm)
        for parent in [each for layer in self.layers for each in layer.modules()]:
            for name, child in parent.named_children():
                if type(child) is Conv1D and not (is_changed(child) or is_compiled(child)):
                    setattr(parent, name, TransposedLinear(child.weight, child.bias).train(child.training))

    @property
    def decoder(self) -> Any:
        return self.causal_lm.transformer

    @property
    def table(self) -> Any:
        return self.decoder.wte

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.h

    @property
    def positions(self) -> Any:
        return self.decoder.wpe

    def entered(self, rows: Tensor, positions: Tensor) -> Tensor:
        return self.decoder.drop(super().entered(rows, positions))

    def shape(self, layer: nn.Module) -> Transformer:
        config = self.causal_lm.config
        inner = 4 * config.n_embd if config.n_inner is None else config.n_inner
        return Transformer(config.n_embd, inner, config.n_head, activation=config.activation_function, causal=True)


class OPTText(TextModel):
    """OPT: two rows of the position table are of no position."""

    norm_name = "final_layer_norm"
    position_offset = 2

    @property
    def decoder(self) -> Any:
        return self.causal_lm.model.decoder

    @property
    def positions(self) -> Any:
        return self.decoder.embed_positions

    def shape(self, layer: nn.Module) -> Transformer:
        config = self.causal_lm.config
        return Transformer(
            config.hidden_size,
            config.ffn_dim,
            config.num_attention_heads,
            activation=config.activation_function,
            biases=BIASES if config.enable_bias else (),
            causal=True,
        )
