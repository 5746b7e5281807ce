"""Directories of tokenizers in the shape of known families of multimodal models: their tokens, and such templates."""

import json
from functools import cache
from pathlib import Path

from unit.data.samples import train_backend

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}MEDIA{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN2_VL = CHATML.replace(
    "MEDIA",
    "{% elif part.type == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>",
)
QWEN2_AUDIO = CHATML.replace(
    "MEDIA",
    "{% elif part.type == 'audio' %}{% set heard.count = heard.count + 1 %}"
    "{{ 'Audio ' ~ heard.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\n' }}",
).replace("{% for m", "{% set heard = namespace(count=0) %}{% for m", 1)
GEMMA3 = (
    "{{ bos_token }}{% set first = '' %}{% if messages[0].role == 'system' %}"
    "{% set first = (messages[0].content if messages[0].content is string else messages[0].content[0].text) + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{{ '<start_of_image>' if part.type == 'image' else part.text | trim }}{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAVA = (
    "{% for m in messages %}{{ m.role | upper + ': ' }}"
    "{% for part in m.content if part.type == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in m.content if part.type == 'text' %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ part.text + eos_token }}{% endgeneration %}{% else %}{{ part.text + ' ' }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
SMOLVLM = (
    "{% for m in messages %}{{ m.role | capitalize + (':' if m.content[0].type == 'image' else ': ') }}"
    "{% for part in m.content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}"
    "{{ '<end_of_utterance>\n' }}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|box_start|>"]
TOKENS = {
    QWEN2_VL: [*IM, *VISION],
    QWEN2_AUDIO: [*IM, "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"],
    GEMMA3: [
        *("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    ],
    LLAVA: ["<s>", "</s>", "<image>"],
    SMOLVLM: ["<eos>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"],
    CHATML: IM,
}


@cache
def _backend(tokens: tuple[str, ...]) -> str:
    return train_backend(list(tokens))


def write_tokenizer(folder: Path, template: str | None, tokens: list[str] = IM, named=None, **files) -> Path:
    """A tokenizer's directory; named: tokenizer_config.json, files: others, by name without `.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_backend(tuple(tokens)))
    (folder / "tokenizer_config.json").write_text(json.dumps(named or {}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
