"""Tiny whole models with weights as trained ones have them, and examples for them: real directories, PNG files, text.

Random weights of a fresh model hide mistakes: its norms multiply by 1, its biases are 0 and its rows nearly equal.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from motet.core.words import number_words

LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message.role | upper }}: "
    "{% for part in message.content if part.type == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message.content if part.type == 'text' %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ part.text + eos_token }}{% endgeneration %}{% else %}{{ part.text + ' ' }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)

ONEVISION_TEMPLATE = LLAVA_TEMPLATE.replace(
    (image := "{% for part in message.content if part.type == 'image' %}{{ '<image>\n' }}{% endfor %}"),
    image + image.replace("image", "video"),
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

QWEN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif message.role == 'assistant' %}{% generation %}{{ part.text + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{{ '\n' if message.role == 'assistant' else '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

QWEN_AUDIO_TEMPLATE = (
    "{% set clips = namespace(count=0) %}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% for part in message.content %}{% if part.type == 'audio' %}{% set clips.count = clips.count + 1 %}"
    "{{ 'Audio ' ~ clips.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\n' }}"
    "{% elif message.role == 'assistant' %}{% generation %}{{ part.text + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{{ '\n' if message.role == 'assistant' else '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

IDEFICS3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}"
    "{{ ':' if message.content[0].type == 'image' else ': ' }}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% elif message.role == 'assistant' %}"
    "{% generation %}{{ part.text + '<end_of_utterance>' }}{% endgeneration %}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{{ '\n' if message.role == 'assistant' else '<end_of_utterance>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

MLLAMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image|>{% elif message.role == 'assistant' %}"
    "{% generation %}{{ part.text + '<|eot_id|>' }}{% endgeneration %}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{{ '' if message.role == 'assistant' else '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

QWEN_TOKENS = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "turn_token": "<|im_start|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}

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
    (FAMILIES | GENERIC)[family](folder / "model")
    if family in AUDIO_FAMILIES:
        write_examples(folder, num_examples, modality="audio")
    elif family in OMNI_FAMILIES:
        write_examples(
            folder, num_examples, [1, 0, 1, 0], num_videos=[0, 0, 1, 1, 0], num_clips=[1, 1, 0, 0, 2], num_frames=5
        )
    elif family in HEARD_FAMILIES:
        counts: dict[str, Any] = {"num_videos": [1, 2, 1, 0], "num_clips": [0, 0, 1, 1], "num_frames": 7}
        write_examples(folder, num_examples, [1, 0, 0], **counts, with_sound=True)
    elif family in VIDEO_FAMILIES:
        images = [1, 0, 2, 0, 1, 0, 0, 1]
        write_examples(folder, num_examples, images, num_videos=[0, 0, 1, 1, 0, 0, 2, 0])
    elif family in ONE_QUESTION:
        write_examples(folder, num_examples, [1, 2], rounds=1)
    else:
        write_examples(folder, num_examples, [1, 0, 2, 1])
    heard = "\n[model.video]\nsound = true\n" if family in HEARD_FAMILIES else ""
    (folder / "recipe.toml").write_text(RECIPE + heard)
    return folder / "recipe.toml"


def write_examples(
    folder: Path,
    num_examples: int,
    num_items: Sequence[int] = (1, 0, 2, 1),
    rounds: int = 2,
    modality: str = "image",
    num_videos: Sequence[int] = (0,),
    num_clips: Sequence[int] = (0,),
    num_frames: int | None = None,
    with_sound: bool = False,
) -> None:
    """train.jsonl: examples with items of many sizes and kinds, of one round or, each third one, several.

    num_items: of one example after the other, again and again; and so num_videos and num_clips (beside images). rounds:
    at most.
    modality: image or audio. num_frames: of videos; by default 5 to 14. with_sound: of videos, as of `write_video`.
    """
    rng = np.random.default_rng(5)
    (folder / "media").mkdir(parents=True)
    records = []
    for number in range(num_examples):
        files = []
        for place in range(num_items[number % len(num_items)]):
            if modality == "image":
                files.append(f"media/{number}-{place}.png")
                _draw(rng, ("RGB", "L", "RGBA", "P")[number // 2 % 4]).save(folder / files[-1])
            else:
                files.append(f"media/{number}-{place}.wav")
                soundfile.write(folder / files[-1], _sound(rng, CLIP_SAMPLES[number // 2 % 4] - place), 16_000)
        words = "".join(rng.choice(list("abcde fgh"), rng.integers(4, 30)))
        videos = [f"media/{number}-{place}" for place in range(num_videos[number % len(num_videos)])]
        videos = [
            write_video(folder, name, number + place, num_frames, with_sound=with_sound)
            for place, name in enumerate(videos)
        ]
        clips = [f"media/{number}-{place}.wav" for place in range(num_clips[number % len(num_clips)])]
        for place, name in enumerate(clips):
            soundfile.write(folder / name, _sound(rng, CLIP_SAMPLES[(number + place) % 4]), 16_000)
        marks = f"<{modality}>\n" * len(files) + "<video>\n" * len(videos) + "<audio>\n" * len(clips)
        turns = [
            {"from": "human", "value": f"{marks}What is {words}?"},
            {"from": "gpt", "value": f"It is {words[::-1]}."},
        ]
        if rounds > 1 and number % 3 == 0:
            turns += [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "Yes."}]
        named = {name: each for name, each in (("audio", clips), (modality, files), ("video", videos)) if each}
        records.append({"conversations": turns, **named})
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


VIDEOS = (
    (".mp4", "mpeg4", "yuv420p", Fraction(24000, 1001)),
    (".mkv", "ffv1", "yuv420p", Fraction(12)),
    (".avi", "mjpeg", "yuvj420p", Fraction(25, 2)),
)
"""Ending, codec, format of pixels and frames a second. The second container does not say how many frames it has."""


SOUND_SAMPLES = (41_600, 9_001, 47_990)
"""Of the sound of a video that lasts longer than the frames stand apart, of one that ends before, and of a long one."""


def write_video(
    folder: Path, name: str, number: int, num_frames: int | None = None, *, with_sound: bool = False
) -> str:
    """A moving picture with noise, in one of `VIDEOS`. Returns its file's name.

    num_frames: by default 5 to 14. with_sound: one of SOUND_SAMPLES, as it is, in a MOV in the place of an MP4.
    """
    import av

    rng = np.random.default_rng(number)
    suffix, codec, pixels, rate = VIDEOS[number % len(VIDEOS)]
    height, width = (2 * rng.integers(8, 30, 2)).tolist()
    y, x = np.mgrid[:height, :width]
    suffix = suffix.replace("mp4", "mov") if with_sound else suffix
    with av.open(folder / f"{name}{suffix}", "w") as container:
        stream = container.add_stream(codec, rate=rate)
        heard = container.add_stream("pcm_s16le", rate=16_000, layout="mono") if with_sound else None
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        for time in range(num_frames or int(rng.integers(5, 15))):
            waves = [128 + 90 * np.sin(x / 5 + y / (3 + channel) + time) for channel in range(3)]
            frame = np.stack(waves, axis=-1) + rng.normal(0, 12, (height, width, 3))
            picture = av.VideoFrame.from_ndarray(frame.clip(0, 255).astype(np.uint8), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
        if heard is not None:
            samples = (_sound(rng, SOUND_SAMPLES[number % len(SOUND_SAMPLES)]) * 2**15).clip(-(2**15), 2**15 - 1)
            sound = av.AudioFrame.from_ndarray(samples[None].astype(np.int16), format="s16", layout="mono")
            sound.sample_rate, sound.pts = 16_000, 0
            container.mux([*heard.encode(sound), *heard.encode(None)])
    return f"{name}{suffix}"


def sound_of(file: Path) -> NDArray[np.float32]:
    """The samples of the sound of such a video, float32 [num_samples], which its file has as they are."""
    import av

    with av.open(file) as container:
        samples = np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])
    return samples.astype(np.float32) / np.float32(2**15)


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
    if hasattr(processor, "image_processor"):
        processor.image_processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    return processor


def without_video(kind: type[transformers.ProcessorMixin]) -> type[transformers.ProcessorMixin]:
    """A class of processors without the part that reads video, which needs torchvision."""
    attributes = [name for name in kind.get_attributes() if name != "video_processor"]
    members: dict[str, Any] = {"get_attributes": classmethod(lambda cls: attributes)}
    if kind is transformers.SmolVLMProcessor:
        # It asks for a package that counts the frames of videos in words, and for what reads them.
        vars(sys.modules[kind.__module__])["num2words"] = number_words
        members["__init__"] = _init_smolvlm
        members["apply_chat_template"] = transformers.ProcessorMixin.apply_chat_template
    if kind is transformers.Qwen2_5OmniProcessor:
        members["__init__"] = _init_omni  # Its own hands the parts on by their places.
    return type(kind.__name__, (kind,), members)


def _init_omni(
    self: Any, image_processor: Any, feature_extractor: Any, tokenizer: Any, chat_template: str | None = None
) -> None:
    transformers.ProcessorMixin.__init__(
        self, image_processor, feature_extractor, tokenizer, chat_template=chat_template
    )
    for name in ("image", "audio", "video"):
        setattr(self, f"{name}_token", getattr(tokenizer, f"{name}_token"))
        setattr(self, f"{name}_token_id", getattr(tokenizer, f"{name}_token_id"))


def _init_smolvlm(
    self: Any, image_processor: Any, tokenizer: Any, image_seq_len: int = 169, chat_template: str | None = None
) -> None:
    kind = transformers.SmolVLMProcessor
    kind.__init__(self, image_processor, tokenizer, None, image_seq_len, chat_template)


CLIP_SAMPLES = (4001, 16_000, 15_850, 9_000)
"""Of a clip that ends within a frame, of one as long as a chunk, of one a frame shorter, and of one of whole frames."""


def _sound(rng: np.random.Generator, num_samples: int) -> NDArray[np.float64]:
    """A tone that rises and falls, with noise, and is loudest at its end."""
    time = np.arange(num_samples) / 16_000
    tone = np.sin(2 * np.pi * rng.uniform(200, 900) * time * (1 + 0.3 * np.sin(9 * time)))
    return 0.4 * (0.2 + np.linspace(0, 1, num_samples)) * tone + rng.normal(0, 0.01, num_samples)


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
    _name_as_published(folder)
    processor.save_pretrained(folder)


def _name_as_published(folder: Path) -> None:
    """Give weights of a vision tower the names of published files, which transformers reads and no longer writes."""
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in weights.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def write_gemma3_crops(folder: Path) -> None:
    """Gemma 3 with pan and scan: up to three crops behind an image."""
    crops = {"min_crop_size": 8, "max_num_crops": 3, "min_ratio_to_activate": 1.3}
    write_gemma3(folder, do_pan_and_scan=True, **{f"pan_and_scan_{name}": each for name, each in crops.items()})


def write_gemma3(folder: Path, **options: Any) -> None:
    """Gemma 3: Siglip, four rows of sixteen patches, windows in half of the layers, tied embeddings.

    options: of its image processor.
    """
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
    images = transformers.Gemma3ImageProcessorPil(size={"height": 24, "width": 24}, **options)
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
    _name_as_published(folder)
    processor.save_pretrained(folder)


CANVASES = [[24, 48], [48, 24], [48, 48], [24, 72], [72, 24]]
"""Height and width of what AnyRes cuts into tiles of 24 pixels."""
LARGE_TILE = {"height": 26, "width": 26}
LARGE_CANVASES = [[side * 26 // 24 for side in canvas] for canvas in CANVASES]
"""The same of tiles that have two pixels more than their patches, as published ones have six (384 pixels by 14)."""


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


def write_granite_vision(folder: Path) -> None:
    """Granite Vision: LLaVA-NeXT on four layers of a Siglip tower side by side, and a Granite."""
    special = {"eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>"}
    tokenizer = tokenizer_with(special)
    processor = transformers.LlavaNextProcessor(
        transformers.LlavaNextImageProcessorPil(
            size=LARGE_TILE, crop_size=LARGE_TILE, image_grid_pinpoints=LARGE_CANVASES
        ),
        tokenizer,
        patch_size=6,
        vision_feature_select_strategy="full",
        chat_template=LLAVA_TEMPLATE,
    )
    tower = TOWER | {"num_hidden_layers": 5}
    config = transformers.LlavaNextConfig(
        vision_config=transformers.SiglipVisionConfig(**tower, image_size=26, patch_size=6, vision_use_head=False),
        text_config=transformers.GraniteConfig(
            vocab_size=len(tokenizer) + 3,
            **BACKBONE,
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.4,
            logits_scaling=2.0,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=LARGE_CANVASES,
        image_seq_length=16,
        vision_feature_layer=[-5, -4, -2, -1],
        vision_feature_select_strategy="full",
    )
    like_trained(transformers.LlavaNextForConditionalGeneration(config)).save_pretrained(folder)
    processor.save_pretrained(folder)


def write_llava_onevision(folder: Path) -> None:
    """LLaVA-OneVision: Siglip's last layer without its norm on tiles, rasters shrunk to two tiles' rows; a Qwen2.

    A tile has two pixels more than its patches, as published ones have six (384 pixels by 14).
    """
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "image_token": "<image>"}
    tokenizer = tokenizer_with(special | {"video_token": "<video>"})
    images = transformers.LlavaOnevisionImageProcessorPil(size=LARGE_TILE, image_grid_pinpoints=LARGE_CANVASES)
    processor = without_video(transformers.LlavaOnevisionProcessor)(
        images,
        tokenizer,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
        chat_template=ONEVISION_TEMPLATE,
    )
    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**TOWER, image_size=26, patch_size=6, vision_use_head=False),
        text_config=transformers.Qwen2Config(vocab_size=len(tokenizer) + 3, **BACKBONE),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=LARGE_CANVASES,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
    )
    like_trained(transformers.LlavaOnevisionForConditionalGeneration(config)).save_pretrained(folder)
    processor.save_pretrained(folder)
    kind = "LlavaOnevisionVideoProcessor"
    videos = {"size": LARGE_TILE, "do_sample_frames": True, "num_frames": 5}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos | {"video_processor_type": kind}))


def write_paligemma(folder: Path) -> None:
    """PaliGemma: Siglip with its norm, a matrix, and a Gemma that ties its embeddings."""
    _write_paligemma(folder, transformers.GemmaConfig, BACKBONE)


def write_paligemma2(folder: Path) -> None:
    """PaliGemma 2: the same with a Gemma 2, whose window is shorter than a prefix and than some answers.

    Its config is as older versions of transformers wrote it: it lacks what is so by default, and has keys of text that
    nothing reads.
    """
    scores = {"query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    _write_paligemma(folder, transformers.Gemma2Config, BACKBONE | scores | {"sliding_window": 7})
    file = folder / "config.json"
    stored = json.loads(file.read_text())
    text = {key: each for key, each in stored["text_config"].items() if key not in _SAID_BY_DEFAULT}
    stored["text_config"] = text | {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"}
    file.write_text(json.dumps(stored))


_SAID_BY_DEFAULT = ("layer_types", "rope_parameters", "use_bidirectional_attention", "tie_word_embeddings")
"""Keys of Gemma 2's config that newer versions of transformers alone write."""


def _write_paligemma(folder: Path, kind: type[transformers.PreTrainedConfig], options: dict[str, Any]) -> None:
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
        text_config=kind(vocab_size=len(tokenizer) + 3, **options, head_dim=8),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=BACKBONE["hidden_size"],
        hidden_size=BACKBONE["hidden_size"],
    )
    like_trained(transformers.PaliGemmaForConditionalGeneration(config)).save_pretrained(folder)
    processor.save_pretrained(folder)


def write_internvl(folder: Path) -> None:
    """InternVL: up to four tiles and the whole image, a norm before the MLP, and a Qwen2 with InternVL3's positions."""
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
        text_config=transformers.Qwen2Config(
            vocab_size=len(tokenizer) + 3,
            **BACKBONE,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    like_trained(transformers.InternVLForConditionalGeneration(config)).save_pretrained(folder)
    processor.save_pretrained(folder)


def write_idefics3(folder: Path) -> None:
    """Idefics3: up to 2 x 2 tiles and the whole image, nine rows joined, tokens for the places of tiles; a Llama."""
    rows = {f"row_{row}_col_{column}_token": f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)}
    tokenizer = _tiled_tokenizer(rows | {"global_token": "<global-img>"})
    images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 70}, max_image_size={"longest_edge": 36})
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=IDEFICS3_TEMPLATE)
    tower = {**TOWER, "image_size": 36, "patch_size": 6}
    _write_tiled(folder, "Idefics3", tower, len(tokenizer), tokenizer, scale_factor=3, tie_word_embeddings=False)
    processor.save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    stored["vision_config"]["model_type"] = "idefics3"  # As published.
    (folder / "config.json").write_text(json.dumps(stored))


def write_smolvlm(folder: Path) -> None:
    """SmolVLM: marks of other names, images that are not split, four rows joined, tied embeddings; videos of 3 frames.

    A tile has two pixels more than its patches, as that of SmolVLM-Instruct has six.
    """
    tokenizer = _tiled_tokenizer({"fake_image_token": "<around>", "global_image_token": "<whole>"})
    images = transformers.SmolVLMImageProcessorPil(
        size={"longest_edge": 33}, max_image_size={"longest_edge": 26}, do_image_splitting=False
    )
    processor = without_video(transformers.SmolVLMProcessor)(
        images, tokenizer, image_seq_len=9, chat_template=IDEFICS3_TEMPLATE
    )
    tower = {**TOWER, "image_size": 26, "patch_size": 4}
    _write_tiled(folder, "SmolVLM", tower, len(tokenizer), tokenizer, scale_factor=2, tie_word_embeddings=True)
    processor.save_pretrained(folder)
    videos = {"max_image_size": {"longest_edge": 26}, "video_processor_type": "SmolVLMVideoProcessor"}
    sampling = {"fps": 20, "max_frames": 3, "video_size": {"longest_edge": 31}}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos | {"video_sampling": sampling}))


def write_mllama(folder: Path) -> None:
    """Llama 3.2 Vision: up to four tiles, rows of two inner layers of the tower, two of five layers that attend to
    images, and a token of images behind the vocabulary that is predicted.
    """
    special = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "pad_token": "<|finetune_right_pad_id|>",
        "begin_token": "<|start_header_id|>",
        "end_token": "<|end_header_id|>",
        "python_token": "<|python_tag|>",
        "image_token": "<|image|>",
    }
    tokenizer = tokenizer_with(special, add_bos_token=True)
    images = transformers.MllamaImageProcessorPil(size={"height": 24, "width": 24}, max_image_tiles=4)
    processor = transformers.MllamaProcessor(images, tokenizer, chat_template=MLLAMA_TEMPLATE)
    shapes = {name: TOWER[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    tower = {
        **shapes,
        "attention_heads": 2,
        "num_global_layers": 2,
        "image_size": 24,
        "patch_size": 8,
        "intermediate_layers_indices": [0, 2],
        "vision_output_dim": 48,
    }
    number = tokenizer.convert_tokens_to_ids("<|image|>")
    text = {
        **BACKBONE,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "cross_attention_layers": [1, 3],
        "vocab_size": number,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        **{
            f"{name}_token_id": tokenizer.convert_tokens_to_ids(special[f"{name}_token"])
            for name in ("bos", "eos", "pad")
        },
    }
    config = transformers.MllamaConfig(vision_config=tower, text_config=text, image_token_index=number)
    like_trained(transformers.MllamaForConditionalGeneration(config)).save_pretrained(folder)
    processor.save_pretrained(folder)


def _tiled_tokenizer(special: dict[str, str]) -> transformers.PreTrainedTokenizerFast:
    plain = {"bos_token": "<s>", "eos_token": "<end_of_utterance>", "pad_token": "<pad>", "image_token": "<image>"}
    marks = {"fake_image_token": "<fake_token_around_image>"}
    return tokenizer_with(plain | marks | special, add_bos_token=True)


def _write_tiled(
    folder: Path,
    kind: str,
    tower: dict[str, Any],
    size: int,
    tokenizer: transformers.PreTrainedTokenizerFast,
    **options: Any,
) -> None:
    config = getattr(transformers, f"{kind}Config")(
        vision_config=tower,
        text_config={"model_type": "llama", "vocab_size": size + 3, **BACKBONE, "pad_token_id": 1},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        **options,
    )
    like_trained(getattr(transformers, f"{kind}ForConditionalGeneration")(config)).save_pretrained(folder)


def write_qwen2_vl(folder: Path) -> None:
    """Qwen2-VL: images of any size on a grid of positions, tied embeddings, areas that bound most of the images."""
    tokenizer = tokenizer_with(QWEN_TOKENS)
    tower = {"embed_dim": 16, "hidden_size": 24, "mlp_ratio": 2, "patch_size": 4, "depth": 2, "num_heads": 2}
    text = _qwen_text(len(tokenizer), num_attention_heads=2, num_key_value_heads=1, hidden_size=24)
    config = transformers.Qwen2VLConfig(
        vision_config=tower, text_config=text, tie_word_embeddings=True, **_qwen_ids(tokenizer)
    )
    like_trained(transformers.Qwen2VLForConditionalGeneration(config)).save_pretrained(folder)
    _save_qwen_processor(folder, transformers.Qwen2VLProcessor, tokenizer)


def write_qwen2_5_vl(folder: Path) -> None:
    """Qwen2.5-VL: windows of 2 x 2 blocks in the first and the last of three layers of the tower."""
    tokenizer = tokenizer_with(QWEN_TOKENS)
    tower = {
        "hidden_size": 16,
        "out_hidden_size": 24,
        "intermediate_size": 28,
        "patch_size": 4,
        "depth": 3,
        "num_heads": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    text = _qwen_text(len(tokenizer), num_attention_heads=2, num_key_value_heads=2, hidden_size=24)
    config = transformers.Qwen2_5_VLConfig(
        vision_config=tower, text_config=text, tie_word_embeddings=False, **_qwen_ids(tokenizer)
    )
    like_trained(transformers.Qwen2_5_VLForConditionalGeneration(config)).save_pretrained(folder)
    _save_qwen_processor(folder, transformers.Qwen2_5_VLProcessor, tokenizer)


QWEN3_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "out_hidden_size": 24,
    "intermediate_size": 28,
    "patch_size": 4,
    "depth": 4,
    "num_heads": 2,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}


def write_qwen3_vl(folder: Path) -> None:
    """Qwen3-VL: rows of two inner layers of the tower enter behind the first two layers of three; tied embeddings."""
    tokenizer = tokenizer_with(QWEN_TOKENS)
    text = _qwen_text(len(tokenizer), num_attention_heads=2, num_key_value_heads=2, hidden_size=24, head_dim=12)
    text |= {"num_hidden_layers": 3}
    config = transformers.Qwen3VLConfig(
        vision_config=QWEN3_TOWER, text_config=text, tie_word_embeddings=True, **_qwen_ids(tokenizer)
    )
    like_trained(transformers.Qwen3VLForConditionalGeneration(config)).save_pretrained(folder)
    _save_qwen_processor(folder, transformers.Qwen3VLProcessor, tokenizer)


def write_qwen3_vl_moe(folder: Path) -> None:
    """Qwen3-VL-MoE: four experts in all layers but one, each matrix the other way round in its file, as published."""
    tokenizer = tokenizer_with(QWEN_TOKENS)
    text = _qwen_text(len(tokenizer), num_attention_heads=2, num_key_value_heads=2, hidden_size=24, head_dim=12)
    text |= {"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    config = transformers.Qwen3VLMoeConfig(
        vision_config=QWEN3_TOWER,
        text_config=text | {"mlp_only_layers": [1]},
        tie_word_embeddings=False,
        **_qwen_ids(tokenizer),
    )
    like_trained(transformers.Qwen3VLMoeForConditionalGeneration(config)).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    turned = {name: each.transpose(1, 2).contiguous() for name, each in weights.items() if ".experts." in name}
    save_file(weights | turned, folder / "model.safetensors", {"format": "pt"})
    _save_qwen_processor(folder, transformers.Qwen3VLProcessor, tokenizer)


def _qwen_text(num_tokens: int, **options: object) -> dict[str, object]:
    return {
        "vocab_size": num_tokens + 3,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 3]},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), None),
        **options,
    }


def _qwen_ids(tokenizer: transformers.PreTrainedTokenizerFast) -> dict[str, int]:
    names = ("image", "video", "vision_start", "vision_end")
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(QWEN_TOKENS[f"{name}_token"]) for name in names}


def _save_qwen_processor(folder: Path, kind: type, tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    """Blocks of 8 x 8 pixels, at least 6 of them and at most 30."""
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 6 * 64, "longest_edge": 30 * 64}
    )
    # By its parts, as transformers writes a processor with videos only where torchvision is.
    tokenizer.chat_template = QWEN_TEMPLATE
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    videos: dict[str, Any] = {"patch_size": 4, "size": {"shortest_edge": 6 * 64, "longest_edge": 12 * 64}}
    if kind is transformers.Qwen3VLProcessor:  # It bounds all frames together.
        videos = {
            "patch_size": 4,
            "size": {"shortest_edge": 20 * 64, "longest_edge": 36 * 64},
            "video_processor_type": "Qwen3VLVideoProcessor",
        }
    sampling = {"do_sample_frames": True, "fps": 6.0, "max_frames": 6}
    (folder / "video_preprocessor_config.json").write_text(json.dumps({**videos, **sampling}))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": kind.__name__}))


def write_qwen2_audio(folder: Path) -> None:
    """Qwen2-Audio: chunks of one second, a hundred frames of 20 mel bands."""
    special = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "turn_token": "<|im_start|>",
        "audio_token": "<|AUDIO|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    }
    tokenizer = tokenizer_with(special)
    extractor = transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1, return_attention_mask=True)
    tower = {
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": 20,
        "d_model": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 28,
        "max_source_positions": 50,
    }
    text = {
        "model_type": "qwen2",
        "vocab_size": len(tokenizer) + 3,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    }
    config = transformers.Qwen2AudioConfig(
        audio_config=tower, text_config=text, audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    )
    like_trained(transformers.Qwen2AudioForConditionalGeneration(config)).save_pretrained(folder)
    transformers.Qwen2AudioProcessor(extractor, tokenizer, chat_template=QWEN_AUDIO_TEMPLATE).save_pretrained(folder)


OMNI_TOKENS = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "turn_token": "<|im_start|>",
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
OMNI_TEMPLATE = (
    QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_bos|><|IMAGE|><|vision_eos|>")
    .replace("<|vision_start|><|video_pad|><|vision_end|>", "<|vision_bos|><|VIDEO|><|vision_eos|>")
    .replace("{% elif message", "{% elif part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% elif message")
)


def omni_thinker() -> tuple[Any, transformers.PreTrainedTokenizerFast]:
    """The config of a tiny thinker of Qwen2.5-Omni, and its tokenizer.

    Chunks of 16 frames of sound; windows of 2 x 2 blocks in the first of two layers of the vision tower.
    """
    tokenizer = tokenizer_with(OMNI_TOKENS)
    tower = {
        "hidden_size": 16,
        "out_hidden_size": 24,
        "intermediate_size": 28,
        "patch_size": 14,
        "depth": 2,
        "num_heads": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    audio = {
        "num_mel_bins": 20,
        "d_model": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 28,
        "max_source_positions": 50,
        "n_window": 8,
        "output_dim": 24,
    }
    text = _qwen_text(len(tokenizer), num_attention_heads=2, num_key_value_heads=2, hidden_size=24)
    ids = {name: OMNI_TOKENS[f"{name}_token"] for name in ("image", "video", "audio")}
    marks = {"vision_start": "vision_bos", "vision_end": "vision_eos"}
    marks |= {"audio_start": "audio_bos", "audio_end": "audio_eos"}
    ids |= {name: OMNI_TOKENS[f"{token}_token"] for name, token in marks.items()}
    config = transformers.Qwen2_5OmniThinkerConfig(
        vision_config=tower,
        audio_config=audio,
        text_config=text,
        tie_word_embeddings=False,
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in ids.items()},
    )
    return config, tokenizer


def write_qwen2_5_omni_thinker(folder: Path) -> None:
    """The thinker of Qwen2.5-Omni: images, videos and sound in one text."""
    config, tokenizer = omni_thinker()
    like_trained(transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)).save_pretrained(folder)
    save_omni_processor(folder, tokenizer)


def write_qwen2_5_omni_sound(folder: Path) -> None:
    """That thinker, whose chunk of silence takes the sound of videos of more than one chunk of seconds."""
    config, tokenizer = omni_thinker()
    like_trained(transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)).save_pretrained(folder)
    save_omni_processor(folder, tokenizer, seconds=3)


def write_qwen2_5_omni(folder: Path) -> None:
    """All of Qwen2.5-Omni: that thinker, and weights that stand for those of the talker and the vocoder."""
    write_qwen2_5_omni_thinker(folder)
    config = transformers.Qwen2_5OmniConfig(thinker_config=omni_thinker()[0].to_dict())
    config.architectures = ["Qwen2_5OmniForConditionalGeneration"]
    config.save_pretrained(folder)
    others = {"talker.codec_head.weight": torch.rand(4, 3), "token2wav.code2wav_dit_model.scale": torch.rand(2)}
    thinker = {f"thinker.{name}": each for name, each in load_file(folder / "model.safetensors").items()}
    save_file(thinker | others, folder / "model.safetensors", {"format": "pt"})
    torch.save({"Chelsie": {}}, folder / "spk_dict.pt")


def save_omni_processor(folder: Path, tokenizer: transformers.PreTrainedTokenizerFast, seconds: int = 2) -> None:
    """Its files, by parts, as published directories have them: one file for images and sound. seconds: of a clip."""
    tokenizer.chat_template = OMNI_TEMPLATE
    tokenizer.save_pretrained(folder)
    images = transformers.Qwen2VLImageProcessorPil(size={"shortest_edge": 6 * 784, "longest_edge": 30 * 784})
    extractor = transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=seconds, return_attention_mask=True)
    stored = {**images.to_dict(), **extractor.to_dict(), "image_processor_type": "Qwen2VLImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(stored))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5OmniProcessor"}))


VIDEO_FAMILIES = ("llava_onevision", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Families whose examples have videos, too."""
OMNI_FAMILIES = ("qwen2_5_omni", "qwen2_5_omni_thinker")
"""Families whose examples have images, videos and clips."""
HEARD_FAMILIES = ("qwen2_5_omni_sound",)
"""The same, whose videos are read with their sound."""
AUDIO_FAMILIES = ("qwen2_audio",)
"""Families whose examples have clips in place of images."""


def _of_no_family(folder: Path, vision: Any, kind: str, **options: Any) -> transformers.PreTrainedTokenizerFast:
    """The model of a class that Motet does not know: its tower, and a Llama. options: of its config."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>"}
    tokenizer = tokenizer_with(special | {"boi_token": "<boi>", "eoi_token": "<eoi>"}, add_bos_token=True)
    config = getattr(transformers, f"{kind}Config")(
        vision_config=vision,
        text_config=transformers.LlamaConfig(vocab_size=len(tokenizer) + 3, **BACKBONE, tie_word_embeddings=False),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
        **options,
    )
    like_trained(getattr(transformers, f"{kind}ForConditionalGeneration")(config)).save_pretrained(folder)
    return tokenizer


def write_vipllava(folder: Path) -> None:
    """VipLLaVA: three layers of CLIP side by side, a norm and an MLP."""
    vision = transformers.CLIPVisionConfig(**TOWER, image_size=24, patch_size=8)
    tokenizer = _of_no_family(folder, vision, "VipLlava", vision_feature_layer=[-2, -3, 1])
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
    transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA_TEMPLATE,
    ).save_pretrained(folder)


def write_deepseek_vl(folder: Path) -> None:
    """DeepSeek-VL: Siglip and an aligner, on images that are padded to a square."""
    vision = transformers.SiglipVisionConfig(**TOWER, image_size=24, patch_size=8, vision_use_head=False)
    tokenizer = _of_no_family(folder, vision, "DeepseekVL")
    images = transformers.DeepseekVLImageProcessorPil(size={"height": 24, "width": 24}, min_size=4)
    processor = transformers.DeepseekVLProcessor(images, tokenizer, LLAVA_TEMPLATE, num_image_tokens=9)
    processor.save_pretrained(folder)


def write_janus(folder: Path) -> None:
    """Janus: a tower and an aligner of its own, marks around an image, and weights that no text trains."""
    shapes = {name: TOWER[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    vision = transformers.JanusVisionConfig(
        **shapes, image_size=24, patch_size=8, projection_dim=24, num_image_tokens=9, mlp_ratio=2.0
    )
    vq = transformers.JanusVQVAEConfig(
        num_embeddings=16,
        base_channels=32,
        channel_multiplier=[1, 1],
        num_res_blocks=1,
        latent_channels=32,
        projection_dim=24,
        image_token_embed_dim=24,
    )
    tokenizer = _of_no_family(folder, vision, "Janus", vq_config=vq)
    images = transformers.JanusImageProcessorPil(size={"height": 24, "width": 24}, min_size=4)
    processor = transformers.JanusProcessor(images, tokenizer, chat_template=LLAVA_TEMPLATE, num_image_tokens=9)
    processor.save_pretrained(folder)


GENERIC: dict[str, Callable[[Path], None]] = {
    "vipllava": write_vipllava,
    "deepseek_vl": write_deepseek_vl,
    "janus": write_janus,
}
"""The same, of models that Motet does not know, and trains by transformers' conventions alone."""

FAMILIES: dict[str, Callable[[Path], None]] = {
    "llava": write_llava,
    "llava_next": write_llava_next,
    "granite_vision": write_granite_vision,
    "llava_onevision": write_llava_onevision,
    "gemma3": write_gemma3,
    "gemma3_crops": write_gemma3_crops,
    "paligemma": write_paligemma,
    "paligemma2": write_paligemma2,
    "internvl": write_internvl,
    "idefics3": write_idefics3,
    "smolvlm": write_smolvlm,
    "mllama": write_mllama,
    "qwen2_vl": write_qwen2_vl,
    "qwen2_5_vl": write_qwen2_5_vl,
    "qwen3_vl": write_qwen3_vl,
    "qwen3_vl_moe": write_qwen3_vl_moe,
    "qwen2_audio": write_qwen2_audio,
    "qwen2_5_omni_thinker": write_qwen2_5_omni_thinker,
    "qwen2_5_omni": write_qwen2_5_omni,
    "qwen2_5_omni_sound": write_qwen2_5_omni_sound,
}
"""Family -> what writes the directory of a tiny model of it."""

TYPES = {
    "gemma3_crops": "gemma3",
    "paligemma2": "paligemma",
    "granite_vision": "llava_next",
    "qwen2_5_omni_sound": "qwen2_5_omni_thinker",
}
"""Families whose `model_type` is that of another."""

ONE_QUESTION = ("paligemma", "paligemma2")
"""Families of whose examples each has an image, one question and one answer."""
