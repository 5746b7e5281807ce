"""Layers and whole modules from their shapes: their parameters, products, output rows and activations for backward.

Every kind of layer is defined here, once. `models/` describes real models by the same functions, and tests compare
their parameters, operations and saved tensors with torch's.

`activation_width` counts the elements of a row that stay until backward, each once (Korthikanti et al. 2022, section
4.1). Attention keeps its log-sum-exp instead of the scores. A transformer layer keeps

    of each norm:   its input, its output (which the next product needs) and its statistics. transformers computes a
                    root mean square norm in float32, so its input counts twice. If the weight is multiplied in float32
                    ("rms_float32": Gemma, OLMo2), the normalised row counts twice too;
    of attention:   query, key, value, output, and the log-sum-exp of each head in float32;
    of the MLP:     its inner row before and after the activation; if gated, the gate before and after the activation,
                    the other factor, and their product.

For gradients of weights alone, so not in a frozen layer through which gradients pass, it keeps what its matrices
multiply (but attention's output, which attention needs) and, of root mean square norms, the normalised row.
The next layer keeps a layer's output, if it needs it. Dropout is off. Elements have a 16-bit dtype, so float32 elements
count twice; a run in float32 keeps up to 8 % fewer elements than counted.
"""

from motet.core.shapes.layers import convolution, embedding, final_norm, head, merge, patches, query_tokens, unused
from motet.core.shapes.modules import audio_encoder, denoising_transformer, language_model, multimodal, vit
from motet.core.shapes.projectors import condition, connect, projector, qformer, resampler
from motet.core.shapes.transformer import BIASES, Activation, Norm, Transformer, crossing_layers

__all__ = [
    "BIASES",
    "Activation",
    "Norm",
    "Transformer",
    "audio_encoder",
    "condition",
    "connect",
    "convolution",
    "crossing_layers",
    "denoising_transformer",
    "embedding",
    "final_norm",
    "head",
    "language_model",
    "merge",
    "multimodal",
    "patches",
    "projector",
    "qformer",
    "query_tokens",
    "resampler",
    "unused",
    "vit",
]
