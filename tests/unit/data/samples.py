"""Tiny media and manifests, and a tokenizer that is trained in milliseconds: what the tests here are made from."""

import json
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<pad>", "<bos>", "<eos>", "<image>", "<audio>", "<user>", "<assistant>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{% generation %}{{ message['content'] }}{{ eos_token }}"
    "{% endgeneration %}{% else %}<user>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def train_backend(special: list[str] = SPECIAL) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = ["What is here? A cat and a dog.", "The answer: seven three one", "ASSISTANT: USER: a.\n"]
    tokenizer.train_from_iterator(corpus * 20, trainer)
    return tokenizer.to_str()


def write_image(path: Path, width: int = 24, height: int = 12, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def write_clip(path: Path, num_samples: int = 1600, rate: int = 16_000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = 0.1 * np.random.default_rng(num_samples).standard_normal(num_samples).astype(np.float32)
    soundfile.write(path, samples, rate)
    return path


def a_record(question: str = "Hello", answer: str = "A cat.", **fields) -> dict:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": turns, **fields}


def write_manifest(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path
