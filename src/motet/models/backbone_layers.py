"""The layers of a backbone as its ModelSpec has them: sizes read off modules and config, beside who holds them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from motet.core.errors import UserError
from motet.core.shapes import Transformer, crossing_layers, embedding, final_norm, head, query_tokens
from motet.core.spec import Layer
from motet.models.block import Block
from motet.models.experts import RoutedExperts
from motet.models.families.shaped import ShapedCausalLM
from motet.models.families.supported import has_option
from motet.models.layers import LayerModules, any_trainable, as_it_learns, products_layer

if TYPE_CHECKING:
    from motet.models.backbone import Backbone

_PRODUCTS = "q_proj", "k_proj", "v_proj", "o_proj"


def backbone_layers(backbone: Backbone) -> list[LayerModules]:
    """The layers in execution order, from tokens to logits."""
    text, hidden, vocab_size = backbone.text, backbone.dim, backbone.causal_lm.config.vocab_size
    table, output = text.table, backbone.causal_lm.lm_head
    num_tokens = table.num_embeddings  # Mllama's has tokens that are never predicted.
    tables = (table,) if text.positions is None else (table, text.positions)
    num_positions = 0 if text.positions is None else text.positions.num_embeddings
    layers = [
        LayerModules(embedding(num_tokens, hidden, num_positions, trainable=any_trainable(*tables)), tables),
        *([_queries_layer(backbone)] if len(backbone.queries) else ()),
        *([products_layer("merge", backbone.merge, hidden)] if isinstance(backbone.merge, nn.Module) else ()),
        *(each for block in backbone.blocks for each in _layers_of(backbone, block)),
        LayerModules(final_norm(hidden, backbone.norm, trainable=any_trainable(text.norm)), (text.norm,)),
        LayerModules(head(vocab_size, hidden, tied=text.is_tied, trainable=any_trainable(output)), (output,)),
    ]
    layers = list(map(as_it_learns, layers))
    if (kept := backbone.kept_of_merge) is not None:
        # A merge without modules is no layer: what it keeps is with the embeddings that it is given.
        at = next((number for number, each in enumerate(layers) if each.layer.kind == "merge"), 0)
        of_layers = layers[at].layer.activation_width if at == 0 else 0
        layers[at] = layers[at]._replace(layer=replace(layers[at].layer, activation_width=of_layers + kept))
    return layers


def window_of(backbone: Backbone, attention: nn.Module) -> int | None:
    """A layer's sliding window: Qwen and Gemma3 set it by layer, Mistral and Phi3 for all layers."""
    config = backbone.causal_lm.config
    of_model = config.sliding_window if has_option(config, "sliding_window") else None
    return getattr(attention, "sliding_window", of_model)


def _layers_of(backbone: Backbone, block: Block) -> list[LayerModules]:
    """The layers of a block. Rows of one that attends to keys count as if they saw all items of their sequence."""
    shape, trainable = shape_of(backbone, block), any_trainable(block)
    if block.number not in backbone.text.crossing:
        layer = shape.layer(trainable=trainable)
        return [LayerModules(layer if shape.mlp else _with_own_mlp(layer, block.mlp), (block,))]
    layer, keys = crossing_layers(shape, sum(backbone.keys.values()), trainable=trainable)
    attention = block.cross_attn
    makes_keys = attention.k_proj, attention.v_proj, attention.k_norm
    return [LayerModules(layer, (block,)), LayerModules(keys, ()).timed_as(*makes_keys)]


def _queries_layer(backbone: Backbone) -> LayerModules:
    """The query tokens; like a token's, their row is looked up."""
    count = sum(each.numel() for each in backbone.queries.values())
    learn = any_trainable(backbone.queries)
    return LayerModules(query_tokens(count, backbone.dim, trainable=learn), (backbone.queries,))


def _with_own_mlp(layer: Layer, mlp: nn.Module) -> Layer:
    """The layer of a block without MLP, with a module of a user's own in its place: a chain of its products."""
    own = products_layer("mlp", mlp, layer.output_width).layer
    # The norm before it, which is of the block, keeps what the first product reads.
    inner = max(own.activation_width - layer.output_width, 0)
    return replace(
        layer,
        weights=layer.weights + own.weights,
        parameters=layer.parameters + own.parameters,
        activation_width=layer.activation_width + inner,
        divided_width=layer.divided_width + inner,
        weight_width=layer.weight_width + inner,
        divided_weight_width=layer.divided_weight_width + inner,
    )


def shape_of(backbone: Backbone, block: Block) -> Transformer:
    """The sizes of a block; one whose MLP is a module of a user's own has `mlp` 0."""
    if isinstance(backbone.causal_lm, ShapedCausalLM):
        return backbone.causal_lm.shape
    if (own := backbone.text.shape(block)) is not None:
        return own
    config = backbone.causal_lm.config
    attention = block.cross_attn if block.number in backbone.text.crossing else block.self_attn
    routed = block.mlp if isinstance(block.mlp, RoutedExperts) else None
    mlp = block.mlp if routed is None else routed.experts
    # Phi3 has one product for queries, keys and values, and one for both factors of the MLP.
    fused = getattr(attention, "qkv_proj", None)
    if fused is None and (lacks := [name for name in _PRODUCTS if not hasattr(attention, name)]):
        raise UserError(
            f"The attention of layer {block.number} of {type(backbone.causal_lm).__name__} is a "
            f"{type(attention).__name__} without {', '.join(lacks)}: only attention of the family can be trained."
        )
    products = {
        "query": fused or attention.q_proj,
        "key": fused or attention.k_proj,
        "value": fused or attention.v_proj,
        "output": attention.o_proj,
    }
    inner = getattr(mlp, "gate_up_proj", getattr(mlp, "up_proj", None))
    is_own = routed is None and (inner is None or not hasattr(mlp, "down_proj"))
    if routed is None and inner is not None:
        products["mlp"] = inner
    normed = getattr(attention, "q_norm", None)
    by_head = normed is not None and normed.weight.numel() == attention.head_dim
    return Transformer(
        config.hidden_size,
        0 if is_own else mlp.down_proj.in_features if routed is None else routed.experts.intermediate_dim,
        config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        gated=True,
        activation=config.hidden_activation if has_option(config, "hidden_activation") else config.hidden_act,
        norm=backbone.norm,
        num_norms=sum(name.endswith("norm") for name, _ in block.inner.named_children()),
        biases=tuple(name for name, product in products.items() if product.bias is not None),
        qk_norm=by_head,
        qk_norm_rows=normed is not None and not by_head,
        causal=True,
        window=window_of(backbone, attention) or 0,
        num_experts=0 if routed is None else routed.num_experts,
        experts_per_token=0 if routed is None else routed.experts_per_token,
    )
