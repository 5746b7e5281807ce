"""A small vision-language model of HF parts, and examples, for own_loop.py, hf_trainer.py and accelerate_loop.py.

The model is an ordinary one but for `insert_features`, and for a rank without sequences.
"""

import numpy as np
from torch import nn
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, SiglipVisionConfig, SiglipVisionModel

from motet.core.example import Media, TokenSequence
from motet.core.workload import BatchLengths, ItemLengths
from motet.dispatch import LoadedExample, take_part

TILE, PATCHES_A_TILE, VOCABULARY = 8, 4, 50


class Tiles:
    """What an image of sizes [num_images, 1] costs the encoder, and the tokens that it becomes: its patches, both."""

    def lengths(self, sizes):
        return sizes[:, 0] * PATCHES_A_TILE

    num_tokens = lengths


class Examples(Dataset):
    """Text, and in front of it up to two images of up to six tiles. Of 32 examples, the first 11 have no image.

    `__getitem__` serves exchange mode; lengths, sequence and media serve index mode.
    """

    def __init__(self, num_examples=64):
        self.num_examples = num_examples

    def __len__(self):
        return self.num_examples

    def __getitem__(self, number):
        images = tuple(self.media(number, "image", item) for item in range(len(self._tiles(number))))
        return LoadedExample(self.sequence(number), images)

    def _tiles(self, number):
        rng = np.random.default_rng(number)
        return rng.integers(1, 7, rng.integers(1, 3) if number % 32 > 10 and number % 4 > 1 else 0)

    def lengths(self, numbers):
        tiles = [self._tiles(number) for number in numbers]
        rows = PATCHES_A_TILE * np.concatenate([np.empty(0, np.int64), *tiles]).astype(np.int64)
        images = ItemLengths(np.repeat(np.arange(len(tiles)), [len(each) for each in tiles]), rows, rows)
        text = np.array([5 + number % 7 for number in numbers], dtype=np.int64)
        tokens = text + np.array([PATCHES_A_TILE * each.sum() for each in tiles], dtype=np.int64)
        return BatchLengths(tokens, text - 2, np.zeros(len(tiles), np.int32), {"image": images})

    def sequence(self, number):
        rng, num_images = np.random.default_rng(number), len(self._tiles(number))
        tokens = rng.integers(0, VOCABULARY, num_images + 5 + number % 7)
        is_answer = np.arange(len(tokens)) >= num_images + 2
        return TokenSequence(tokens, is_answer, ("image",) * num_images, np.arange(num_images))

    def media(self, number, phase, item):
        tiles = self._tiles(number)[item]
        pixels = np.random.default_rng([number, item]).standard_normal((tiles, 3 * TILE * TILE), np.float32)
        return Media(pixels, np.array([tiles]))


class Images(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.tower = SiglipVisionModel(
            SiglipVisionConfig(
                hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                image_size=TILE, patch_size=TILE // 2, vision_use_head=False,
            )
        )  # fmt: skip
        self.projector = nn.Linear(16, dim)

    def forward(self, values, sizes):
        tiles = self.tower(values.view(-1, 3, TILE, TILE)).last_hidden_state
        return self.projector(tiles).flatten(0, 1)


class VLM(nn.Module):
    def __init__(self, dim=32, num_layers=2):
        super().__init__()
        self.images = Images(dim)
        self.llm = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=VOCABULARY, hidden_size=dim, intermediate_size=2 * dim, num_hidden_layers=num_layers,
                num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
            )
        )  # fmt: skip

    def forward(self, batch):
        """The loss summed over the targets of this rank's sequences."""
        packed = batch.sequences
        embeds = self.llm.get_input_embeddings()(packed.tokens)
        embeds = batch.insert_features(embeds, "image", self.images)
        if packed.num_tokens == 0:  # fewer examples than ranks
            return take_part(embeds.sum(), self.llm.parameters())
        hidden = self.llm.model(inputs_embeds=embeds[None], position_ids=packed.position_ids[None], use_cache=False)
        logits = self.llm.lm_head(hidden.last_hidden_state[0])
        return nn.functional.cross_entropy(logits[:-1], packed.labels[1:], reduction="sum")
