"""Tiny whole models with weights as trained ones have them, and examples for them: real directories, PNG files, text.

Random weights of a fresh model hide mistakes: its norms multiply by 1, its biases are 0 and its rows nearly equal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message.role | upper }}: "
    "{% for part in message.content if part.type == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message.content if part.type == 'text' %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ part.text + eos_token }}{% endgeneration %}{% else %}{{ part.text + ' ' }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)

GEMMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}"
    "{% for part in message.content %}{% if part.type == 'image' %}<start_of_image>"
    "{% elif message.role == 'assistant' %}{% generation %}{{ part.text | trim }}<end_of_turn>{% endgeneration %}"
    "{% else %}{{ part.text | trim }}{% endif %}{% endfor %}"
    "{{ '\n' if message.role == 'assistant' else '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

RECIPE = """\
[run]
dir = "run"
steps = 3
batch_size = 4

[model]
path = "model"

[data]
train = ["train.jsonl"]

[optimizer]
lr = 1e-3
"""
"""All that a recipe of a whole model must say."""


TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
BACKBONE: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
"""Shapes of tiny towers and backbones."""


def write_job(folder: Path, family: str, num_examples: int = 8) -> Path:
    """The directory of a tiny model, examples for it and a recipe. Returns the path of the recipe."""
    torch.manual_seed(11)
    FAMILIES[family](folder / "model")
    if family in ONE_QUESTION:
        write_examples(folder, num_examples, [1, 2], rounds=1)
    else:
        write_examples(folder, num_examples, [1, 0, 1] if family in ONE_IMAGE else [1, 0, 2, 1])
    (folder / "recipe.toml").write_text(RECIPE)
    return folder / "recipe.toml"


def write_examples(folder: Path, num_examples: int, num_images: Sequence[int] = (1, 0, 2, 1), rounds: int = 2) -> None:
    """train.jsonl: examples with images of many sizes and kinds, of one round or, each third one, several.

    num_images: of one example after the other, again and again. rounds: at most.
    """
    rng = np.random.default_rng(5)
    (folder / "images").mkdir(parents=True)
    records = []
    for number in range(num_examples):
        files = []
        for place in range(num_images[number % len(num_images)]):
            files.append(f"images/{number}-{place}.png")
            _draw(rng, ("RGB", "L", "RGBA", "P")[number // 2 % 4]).save(folder / files[-1])
        words = "".join(rng.choice(list("abcde fgh"), rng.integers(4, 30)))
        turns = [
            {"from": "human", "value": "<image>\n" * len(files) + f"What is {words}?"},
            {"from": "gpt", "value": f"It is {words[::-1]}."},
        ]
        if rounds > 1 and number % 3 == 0:
            turns += [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "Yes."}]
        records.append({"conversations": turns, **({"image": files} if files else {})})
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def _draw(rng: np.random.Generator, mode: str) -> Image.Image:
    """A smooth picture with noise, of a size that no processor leaves as it is."""
    height, width = rng.integers(9, 60, 2)
    y, x = np.mgrid[:height, :width]
    waves = [128 + 90 * np.sin(x / rng.uniform(2, 9) + y / rng.uniform(2, 9)) for _ in range(4)]
    pixels = (np.stack(waves, axis=-1) + rng.normal(0, 12, (height, width, 4))).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels if mode == "RGBA" else pixels[..., :3]).convert(mode)


def open_processor(folder: Path) -> Any:
    """The processor of a directory, without the part that reads video; its image processor works on PIL."""
    stored = json.loads((folder / "processor_config.json").read_text())
    processor = without_video(getattr(transformers, stored["processor_class"])).from_pretrained(folder)
    processor.image_processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    return processor


def without_video(kind: type[transformers.ProcessorMixin]) -> type[transformers.ProcessorMixin]:
    """A class of processors without the part that reads video, which needs torchvision."""
    attributes = [name for name in kind.get_attributes() if name != "video_processor"]
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: attributes)})


def tokenizer_with(special: dict[str, str], **options: object) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of bytes with special tokens by name (bos_token, image_token, ...)."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    plain = ("bos_token", "eos_token", "pad_token", "unk_token")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        extra_special_tokens={name: token for name, token in special.items() if name not in plain},
        **{name: token for name, token in special.items() if name in plain},
        **options,
    )


def like_trained(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with norms away from 1, biases away from 0, and products that keep the scale of their input."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 and "weight" in name:
                parameter.copy_(0.8 + 0.4 * torch.rand_like(parameter))
            elif parameter.ndim < 2:
                parameter.normal_(0, 0.2)
            elif "embed" in name:
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, 1.2 / math.sqrt(parameter[0].numel()))
    return model


def write_llava(folder: Path, *, tied: bool = False) -> None:
    """LLaVA 1.5: a CLIP tower whose second to last layer is taken, and a Llama."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>"}
    tokenizer = tokenizer_with(special, add_bos_token=True)
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
    processor = transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA_TEMPLATE,
    )
    tower = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=28, num_hidden_layers=3, num_attention_heads=2, image_size=24, patch_size=8
    )
    text = transformers.LlamaConfig(
        vocab_size=len(tokenizer) + 3,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    config = transformers.LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=9,
        tie_word_embeddings=tied,
    )
    model = like_trained(transformers.LlavaForConditionalGeneration(config))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def write_gemma3(folder: Path) -> None:
    """Gemma 3: Siglip, four rows of sixteen patches, windows in half of the layers, tied embeddings."""
    special = {
        "bos_token": "<bos>",
        "eos_token": "<end_of_turn>",
        "pad_token": "<pad>",
        "turn_token": "<start_of_turn>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokenizer = tokenizer_with(special, add_bos_token=True)
    images = transformers.Gemma3ImageProcessorPil(size={"height": 24, "width": 24})
    processor = transformers.Gemma3Processor(images, tokenizer, chat_template=GEMMA3_TEMPLATE, image_seq_length=4)
    tower = transformers.SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=24,
        patch_size=6,
        vision_use_head=False,
    )
    text = transformers.Gemma3TextConfig(
        vocab_size=len(tokenizer) + 3,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )
    config = transformers.Gemma3Config(
        vision_config=tower,
        text_config=text,
        mm_tokens_per_image=4,
        **{
            f"{name}_token_index": tokenizer.convert_tokens_to_ids(special[f"{name}_token"])
            for name in ("boi", "eoi", "image")
        },
    )
    model = like_trained(transformers.Gemma3ForConditionalGeneration(config))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


CANVASES = [[24, 48], [48, 24], [48, 48], [24, 72], [72, 24]]
"""Height and width of what AnyRes cuts into tiles of 24 pixels."""


def write_llava_next(folder: Path) -> None:
    """LLaVA-NeXT: LLaVA on tiles of many canvases, with newline rows; a Mistral."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>"}
    tokenizer = tokenizer_with(special, add_bos_token=True)
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24}, image_grid_pinpoints=CANVASES
    )
    processor = transformers.LlavaNextProcessor(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA_TEMPLATE,
    )
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**TOWER, image_size=24, patch_size=8),
        text_config=transformers.MistralConfig(vocab_size=len(tokenizer) + 3, **BACKBONE, sliding_window=None),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=CANVASES,
        image_seq_length=9,
    )
    like_trained(transformers.LlavaNextForConditionalGeneration(config)).save_pretrained(folder)
    processor.save_pretrained(folder)


def write_llava_onevision(folder: Path) -> None:
    """LLaVA-OneVision: Siglip's last layer without its norm on tiles, rasters shrunk to two tiles' rows; a Qwen2."""
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "image_token": "<image>"}
    tokenizer = tokenizer_with(special | {"video_token": "<video>"})
    images = transformers.LlavaOnevisionImageProcessorPil(
        size={"height": 24, "width": 24}, image_grid_pinpoints=CANVASES
    )
    processor = without_video(transformers.LlavaOnevisionProcessor)(
        images,
        tokenizer,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
        chat_template=LLAVA_TEMPLATE,
    )
    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**TOWER, image_size=24, patch_size=6, vision_use_head=False),
        text_config=transformers.Qwen2Config(vocab_size=len(tokenizer) + 3, **BACKBONE),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=CANVASES,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
    )
    like_trained(transformers.LlavaOnevisionForConditionalGeneration(config)).save_pretrained(folder)
    processor.save_pretrained(folder)


def write_paligemma(folder: Path) -> None:
    """PaliGemma: Siglip with its norm, a matrix, and a Gemma that ties its embeddings."""
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "image_token": "<image>"}
    tokenizer = tokenizer_with(special, add_bos_token=True)
    images = transformers.SiglipImageProcessorPil(size={"height": 24, "width": 24})
    images.image_seq_length = 16
    processor = transformers.PaliGemmaProcessor(images, tokenizer)
    tower = transformers.SiglipVisionConfig(
        **TOWER, image_size=24, patch_size=6, vision_use_head=False, projection_dim=BACKBONE["hidden_size"]
    )
    config = transformers.PaliGemmaConfig(
        vision_config=tower,
        text_config=transformers.GemmaConfig(vocab_size=len(tokenizer) + 3, **BACKBONE, head_dim=8),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=BACKBONE["hidden_size"],
        hidden_size=BACKBONE["hidden_size"],
    )
    like_trained(transformers.PaliGemmaForConditionalGeneration(config)).save_pretrained(folder)
    processor.save_pretrained(folder)


def write_internvl(folder: Path) -> None:
    """InternVL: up to four tiles and the whole image, a norm before the MLP, and a Qwen2."""
    special = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = tokenizer_with(special)
    images = transformers.GotOcr2ImageProcessorPil(size={"height": 24, "width": 24}, max_patches=4)
    processor = without_video(transformers.InternVLProcessor)(
        images, tokenizer, image_seq_length=4, chat_template=LLAVA_TEMPLATE.replace("<image>", "<IMG_CONTEXT>")
    )
    config = transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(
            **TOWER, image_size=[24, 24], patch_size=[6, 6], attention_bias=True
        ),
        text_config=transformers.Qwen2Config(vocab_size=len(tokenizer) + 3, **BACKBONE),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    like_trained(transformers.InternVLForConditionalGeneration(config)).save_pretrained(folder)
    processor.save_pretrained(folder)


FAMILIES: dict[str, Callable[[Path], None]] = {
    "llava": write_llava,
    "llava_next": write_llava_next,
    "llava_onevision": write_llava_onevision,
    "gemma3": write_gemma3,
    "paligemma": write_paligemma,
    "internvl": write_internvl,
}
"""Family -> what writes the directory of a tiny model of it."""

ONE_IMAGE = ("llava_onevision",)
"""Families of whose examples none has several images."""
ONE_QUESTION = ("paligemma",)
"""Families of whose examples each has an image, one question and one answer."""
