"""HF models that a user has built or loaded, as one multimodal model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from motet.core.errors import UserError
from motet.core.workload import BACKBONE
from motet.models.attention import ATTENTION
from motet.models.backbone import Backbone
from motet.models.block import is_called_otherwise, is_compiled
from motet.models.exact import keep_float64
from motet.models.families.registry import ENCODERS, backbone_family
from motet.models.families.supported import check_encoder
from motet.models.generator import GeneratorModule
from motet.models.generator_build import build_generator
from motet.models.generator_config import GeneratorConfig
from motet.models.mllm import MLLM
from motet.models.module import ModalityModule
from motet.models.projector import ProjectorConfig, build_projector


def compose(
    backbone: PreTrainedModel,
    encoders: Mapping[str, PreTrainedModel | ModalityModule],
    projectors: Mapping[str, ProjectorConfig] | None = None,
    generators: Mapping[str, GeneratorConfig | GeneratorModule] | None = None,
) -> MLLM:
    """A multimodal model of HF models, which are changed in place: to attention on packed items, and as to names.

    encoders:   by the name of their phase: an HF vision tower or audio encoder, which gets a projector with random
                weights, or a `ModalityModule`, which has one.
    projectors: of HF encoders, by name; by default an MLP of two layers.
    generators: by the name of their phase: what `[model.generators.NAME]` says, or a `GeneratorModule`. Query tokens
                are drawn from torch's generator; they learn with the output projector.
    What is frozen (`requires_grad_(False)`) stays frozen.
    Raises UserError for a class that no family of the registry has, for options that Motet does not compute, for rows
    that are not as wide as the backbone's, for a hook on the whole backbone, for what `torch.compile` returns, and for
    a dict in place of a config.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM, SiglipVisionConfig, SiglipVisionModel
        >>> heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        >>> llm = Qwen2ForCausalLM(Qwen2Config(vocab_size=9, hidden_size=8, num_key_value_heads=1, **heads))
        >>> tower = SiglipVisionModel(SiglipVisionConfig(hidden_size=4, image_size=8, patch_size=2, **heads))
        >>> mllm = compose(llm, {"image": tower})
        >>> mllm.encoders["image"].projector.input_dim, mllm.backbone.dim
        (4, 8)
    """
    projectors = projectors or {}
    if unknown := projectors.keys() - encoders.keys():
        raise UserError(
            f"There is a projector for {min(unknown)!r}, and no such encoder; there are {', '.join(encoders)}."
        )
    generators = generators or {}
    for kind, given, config in (("projector", projectors, ProjectorConfig), ("generator", generators, GeneratorConfig)):
        if name := next((name for name, each in given.items() if isinstance(each, Mapping)), None):
            where = f"{config.__module__}.{config.__name__}"
            raise UserError(f"The {kind} of {name!r} is a {type(given[name]).__name__}; make it a {where}(**...).")
    _check_names(encoders, "an encoder")
    _check_names(generators, "a generator")
    if both := encoders.keys() & generators.keys():
        raise UserError(f"{min(both)!r} names an encoder and a generator: give each a name of its own.")
    backbone_family(backbone)
    if is_called_otherwise(backbone) or is_compiled(backbone):
        raise UserError(
            f"The {type(backbone).__name__} has a hook on its forward or backward pass, a forward of its own, or is "
            "compiled, which would never run, as what is in it is called: do so to a module in it, as to its layers."
        )
    _check_no_wrapper(backbone)
    backbone.set_attn_implementation(ATTENTION)
    queries = {name: each.num_queries for name, each in generators.items() if each.num_queries}
    whole = Backbone(backbone, queries=queries, turns=[name for name in generators if name not in queries])
    whole.queries.to(next(backbone.parameters()).device)
    made = {}
    for name, encoder in encoders.items():
        if isinstance(encoder, ModalityModule):
            if (width := getattr(encoder.projector, "output_dim", whole.dim)) != whole.dim:
                raise UserError(
                    f"The projector of {name!r} makes rows of {width} values; the backbone takes rows of {whole.dim}."
                )
            made[name] = encoder
        else:
            made[name] = _projected(name, encoder, whole, projectors.get(name, ProjectorConfig()))
    return MLLM(made, whole, {name: _behind(name, each, whole) for name, each in generators.items()})


def _check_no_wrapper(model: PreTrainedModel) -> None:
    """Raise UserError for a module in the place of one of the family's, which would not be known for it."""
    if name := next((name for name, each in model.named_modules() if "_orig_mod" in each._modules), ""):
        raise UserError(
            f"{name} of the {type(model).__name__} is what torch.compile returns, in whose names and class the "
            f"family's are not known: compile it in place, by model.{name}.compile()."
        )


def _check_names(named: Mapping[str, object], what: str) -> None:
    for name in named:
        if name == BACKBONE or not name.isidentifier() or hasattr(nn.ModuleDict(), name):
            raise UserError(f"{name!r} cannot name {what}: take letters, digits and _, and no name of a method.")


def _behind(name: str, generator: GeneratorConfig | GeneratorModule, backbone: Backbone) -> GeneratorModule:
    """A generator that reads the backbone's rows; a new one is in its dtype, with weights by torch's seed."""
    like = next(weight for weight in backbone.parameters() if weight.is_floating_point())
    if isinstance(generator, GeneratorConfig):
        seed = int(torch.randint(2**31, ()))
        generator = build_generator(name, generator, backbone.dim, like.dtype, seed).to(like.device)
    if (width := generator.entrance.projector.input_dim) != backbone.dim:
        raise UserError(
            f"The output projector of {name!r} reads rows of {width} values; the backbone's have {backbone.dim}."
        )
    if name in backbone.queries:
        learn = any(weight.requires_grad for weight in generator.entrance.parameters())
        backbone.queries[name].requires_grad_(learn)
    return generator


def _projected(name: str, encoder: PreTrainedModel, backbone: Backbone, config: ProjectorConfig) -> ModalityModule:
    """An HF encoder with a projector to the backbone's width."""
    family = next((family for family in ENCODERS.values() if type(encoder) is family.model), None)
    if family is None:
        known = ", ".join(family.model.__name__ for family in ENCODERS.values())
        raise UserError(f"{type(encoder).__name__} is no encoder that Motet knows as {name!r}; there are {known}.")
    check_encoder(encoder.config, f"{type(encoder).__name__}: ")
    _check_no_wrapper(encoder)
    encoder.set_attn_implementation(ATTENTION)
    adapter = family.adapter(encoder)
    like = next(encoder.parameters())
    projector = build_projector(adapter.output_dim, backbone.dim, config).to(like.device, like.dtype)
    keep_float64(projector)
    return ModalityModule(adapter, projector)
