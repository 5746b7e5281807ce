"""The layers of diffusers' AutoencoderKL before a loss: the encoder's products, and what they hold while they run.

The length of an item is its number of latents; before k of n halvings it has a fourth to the power of k - n rows for
each. Nothing learns and the input is data, so there is no backward pass, and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from motet.core.spec import Attention, Layer
from motet.models.layers import LayerModules, layer_of, unused_layer


def vae_layers(vae: Any) -> list[LayerModules]:
    """The layers in execution order. vae: an AutoencoderKL of the blocks that `vae.VAE` takes."""
    beside = nn.ModuleList(part for part in (vae.decoder, vae.post_quant_conv) if part is not None)
    decoder = unused_layer(beside, vae.config.out_channels)
    return [*_encoder(vae), decoder._replace(layer=_of_data(decoder.layer))]


def unused_vae(vae: Any) -> LayerModules:
    """All of it as a layer that a step never calls."""
    made = unused_layer(vae, vae.config.out_channels)
    return made._replace(layer=_of_data(made.layer))


def _encoder(vae: Any) -> Iterator[LayerModules]:
    encoder, multiple = vae.encoder, 4 ** (len(vae.config.block_out_channels) - 1)
    first, last = encoder.conv_in, encoder.conv_out
    yield _of_rows("convolution", multiple, first.in_channels, first.out_channels, (first,))
    for block in encoder.down_blocks:
        for residual in block.resnets:
            yield _residual(residual, multiple)
        for down in block.downsamplers or ():
            multiple //= 4
            # Its input has four times as many rows, and is copied with a margin.
            held = 8 * down.conv.in_channels
            yield _of_rows("strided_convolution", multiple, held, down.conv.out_channels, (down,))
    mid = encoder.mid_block
    yield _residual(mid.resnets[0], 1)
    for attention, residual in zip(mid.attentions, mid.resnets[1:], strict=True):
        if attention is not None:
            width = attention.to_q.out_features
            yield _of_rows("attention", 1, 6 * width, width, (attention,), Attention(width, width))
        yield _residual(residual, 1)
    yield _of_rows("latents", 1, 2 * last.in_channels, last.out_channels, (encoder.conv_norm_out, last))
    if vae.quant_conv is not None:
        yield _of_rows("projection", 1, last.out_channels, last.out_channels, (vae.quant_conv,))


def _residual(block: Any, multiple: int) -> LayerModules:
    """A ResnetBlock2D without a timestep: while it runs it holds its input, and a norm's output on both sides."""
    width, out = block.conv1.in_channels, block.conv1.out_channels
    own = (block.norm1, block.conv1, block.norm2, block.conv2, block.conv_shortcut)
    return _of_rows("convolution", multiple, width + 2 * max(width, out), out, own).timed_as(block)


def _of_rows(
    kind: str,
    multiple: int,
    held: int,
    output: int,
    modules: tuple[nn.Module | None, ...],
    attention: Attention | None = None,
) -> LayerModules:
    made = layer_of(kind, modules, held, output, attention, multiple=multiple)
    return made._replace(layer=_of_data(made.layer))


def _of_data(layer: Layer) -> Layer:
    return replace(layer, trainable=False, reads_data=True, continues=True)
