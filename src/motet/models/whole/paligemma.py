"""PaliGemma (Beyer et al. 2024, section 3): Siglip, a matrix, and Gemma, whose prefix sees itself in both directions.

PaliGemma 2 (Steiner et al. 2024, section 3) has Gemma 2 in its place; windows of its layers hide nothing of a prefix.
The prefix is the image and the question; the answer is causal. Its directories have no chat template: their processor
writes the images, the token that begins a text, the question and a line break, and then the answer and its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

from motet.models.whole.family import (
    VISION_TOWER,
    WholeBackboneConfig,
    WholeEncoderConfig,
    WholeFamily,
    WholeParts,
    check_option,
    language_family,
    one_tower,
    vision_family,
)
from motet.models.whole.processor import Images, check_token_counts
from motet.models.whole.projector import StoredProjectorConfig

if TYPE_CHECKING:
    from motet.models.whole.directory import WholeDirectory

_PROJECTOR = "model.multi_modal_projector.linear."

_TEMPLATE = (
    "{% set roles = messages | map(attribute='role') | list %}"
    "{% if roles[1:] not in ([], ['assistant']) or roles[:1] != ['user'] %}"
    "{{ raise_exception('PaliGemma takes one question, and one answer to it') }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{% if message.content is string %}{{ bos_token + message.content | trim }}{% else %}"
    "{% for part in message.content if part.type == 'image' %}{{ '<image>' }}{% endfor %}{{ bos_token }}"
    "{% for part in message.content if part.type == 'text' %}{{ part.text | trim }}{% endfor %}{% endif %}{{ '\n' }}"
    "{% else %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)


def _parts(config: PaliGemmaConfig, directory: WholeDirectory) -> WholeParts:
    where = str(directory.file)
    family = language_family(config, where, "gemma", "gemma2")
    check_option(where, "projection_dim", config.projection_dim, config.text_config.hidden_size)
    # It stands for the mask that the whole model makes, of the prefix alone.
    check_option(where, "use_bidirectional_attention", config.text_config.use_bidirectional_attention, True)
    tower = config.vision_config
    check_token_counts(directory.path, image_seq_length=(tower.image_size // tower.patch_size) ** 2)
    weights = {f"layers.0.{kind}": f"{_PROJECTOR}{kind}" for kind in ("weight", "bias")}
    encoder = WholeEncoderConfig(
        family=vision_family(config, where, "siglip"),
        path=directory.path,
        projector=StoredProjectorConfig(kind="linear", tensors=directory.tensors_at(weights)),
    )
    return one_tower(
        WholeBackboneConfig(
            family=family,
            path=directory.path,
            config={"tie_word_embeddings": config.tie_word_embeddings, "use_bidirectional_attention": False},
            prefix=True,
            first_position=1,
        ),
        "image",
        encoder,
        Images.of(tower),
        VISION_TOWER,
        weights,
    )


PALIGEMMA = WholeFamily(PaliGemmaForConditionalGeneration, _parts, _TEMPLATE)
