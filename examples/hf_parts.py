"""A small vision tower and language model of HF, and batches, for apply_plan.py. Loaded models do as well."""

import numpy as np
from transformers import Qwen2Config, Qwen2ForCausalLM, SiglipVisionConfig, SiglipVisionModel

from motet.core.example import Media, TokenSequence
from motet.dispatch import LoadedExample

VOCABULARY, PATCH = 50, 4
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def vision_tower():
    return SiglipVisionModel(SiglipVisionConfig(hidden_size=16, image_size=32, patch_size=PATCH, **LAYERS))


def language_model():
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_key_value_heads": 1}
    return Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=False, **sizes, **LAYERS))


def example(number):
    """Text, and in front of it up to two images of any size; every third example has none."""
    rng = np.random.default_rng(number)
    sizes = rng.integers(1, 7, (rng.integers(1, 3) if number % 3 else 0, 2))
    images = tuple(Media(rng.standard_normal((size.prod(), 3 * PATCH**2), np.float32), size) for size in sizes)
    tokens = rng.integers(0, VOCABULARY, len(images) + 5 + number % 7)
    is_answer = np.arange(len(tokens)) >= len(images) + 2
    text = TokenSequence(tokens, is_answer, ("image",) * len(images), np.arange(len(images)))
    return LoadedExample(text, images)


def batches(batch_size=8, num_steps=6):
    """The examples of each step: on every rank all of them."""
    return [[example(step * batch_size + index) for index in range(batch_size)] for step in range(num_steps)]
