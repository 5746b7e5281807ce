"""LoRA adapters: products whose frozen weight gets a trained one of low rank beside it (Hu et al. 2021, section 4.1).

    y = W x + b + scale * B A dropout(x)        A: [rank, in], B: [out, rank], scale: alpha / rank

Layers, names of weights (`q_proj.lora_A.weight`) and the initial values' distribution are those of `peft`. The layers
are our own: they keep the names of the base weights, so that all that reads, shards, cuts and stores weights by name
does with them what it does without adapters. Tests hold them to peft's own model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from motet.chunked import ColumnLinear
from motet.core.errors import UserError
from motet.core.workload import BACKBONE
from motet.dropout import whole_columns
from motet.models.backbone import Backbone
from motet.models.block import Block, plain_names
from motet.models.fused import SplitLinear
from motet.models.initialise import seeded
from motet.models.lora_read import PREFIX, read_adapter
from motet.models.mllm import MLLM
from motet.models.module import ModalityModule
from motet.models.named_weights import is_lora, is_named
from motet.tensor_parallel import RowLinear, RowParts, SharedLinear
from motet.transposed import TransposedLinear, is_transposed, out_first

ALL_LINEAR = "all-linear"


class LoraConfig(BaseModel):
    """`[model.lora.PART]` of a recipe: LoRA adapters of an encoder or of the backbone, whose own weights are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    rank: int = Field(gt=0, le=2**16, description="of the product that is added to each weight")
    alpha: float | None = Field(
        None, gt=0, le=1e6, description="what is added is multiplied by alpha / rank; default: 2 * rank"
    )
    targets: Literal["all-linear"] | tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        ALL_LINEAR,
        description="linear layers of the part's blocks: the ends of their names, in which * is any characters, as in "
        '["q_proj", "mlp.*"]; "all-linear": all of them',
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="of what the adapter reads; masks are drawn by item")
    rank_stabilized: bool = Field(
        False, description="multiply by alpha / sqrt(rank) instead (rsLoRA; Kalajdzievski 2023)"
    )
    path: Path | None = Field(
        None, description="a directory of peft, from whose adapters they start: of the same rank, alpha and layers"
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _targets_understood(cls, given: object) -> object:
        """Refuse what is neither in one sentence: pydantic would name the first kind alone."""
        names = list(given) if isinstance(given, list | tuple) else []
        if given != ALL_LINEAR and not (names and all(isinstance(name, str) and name for name in names)):
            raise ValueError(f'{given!r} is neither "all-linear" nor a list of names of layers, as in ["q_proj"]')
        return given if given == ALL_LINEAR else tuple(names)

    of_whole: ClassVar[bool] = False
    """Whether `path` is of a whole model, whose other parts may have adapters in it, too."""

    def own_name(self, key: str) -> str | None:
        """The name in the part's HF model of a weight of its adapters that peft has saved as `key`; None of no such."""
        return key.removeprefix(PREFIX) if key.startswith(PREFIX) and is_lora(key) else None

    @property
    def scale(self) -> float:
        """What the product of B and A is multiplied by."""
        return self.full_alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    @property
    def full_alpha(self) -> float:
        """`alpha`, or its default."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


class Adapted(nn.Module):
    """A layer with an adapter, whose config is `config`.

    reads_part: whether the layer's input has some of the columns alone, as of a product that tensor-parallel ranks
                share.
    """

    lora_A: nn.Linear
    lora_B: nn.Linear
    reads_part = False

    def set_config(self, config: LoraConfig) -> None:
        """Set how the adapter computes."""
        self.config, self.scale, self.lora_dropout = config, config.scale, config.dropout

    def lowered(self, x: Tensor) -> Tensor:
        """x [..., in] -> A dropout(x) [..., rank]."""
        if self.training and self.lora_dropout:
            with whole_columns(not self.reads_part):
                x = dropout(x, self.lora_dropout)
        return self.lora_A(x)

    def added(self, x: Tensor) -> Tensor:
        """x [..., in] -> what the adapter adds to the output [..., out]."""
        return self.lora_B(self.lowered(x)) * self.scale


class LoraLinear(Adapted, nn.Linear):
    """A linear layer with an adapter. It has the parameters of `layer`, which it does not change.

    The values of A and B are not set. They are where the weight is: on its device, in its dtype.

    Example:
        >>> layer = LoraLinear(nn.Linear(6, 4), LoraConfig(rank=2))
        >>> [(name, tuple(weight.shape)) for name, weight in layer.named_parameters() if "lora" in name]
        [('lora_A.weight', (2, 6)), ('lora_B.weight', (4, 2))]
    """

    def __init__(self, layer: nn.Linear, config: LoraConfig) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias, self.is_transposed = layer.weight, layer.bias, is_transposed(layer)
        self.lora_A = _like(layer.weight, config.rank, self.in_features)
        self.lora_B = _like(layer.weight, self.out_features, config.rank)
        self.set_config(config)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, out_first(self), self.bias) + self.added(x)


class SplitLora(Adapted, SplitLinear):
    """`SplitLinear` of a layer with an adapter: each part has its rows of B, and A belongs to all of them."""

    def __init__(self, layer: LoraLinear, widths: Sequence[int]) -> None:
        super().__init__(layer, widths)
        self.lora_A = layer.lora_A
        self.set_config(layer.config)
        whole = layer.lora_B.weight
        for (first, stop), part in zip(self.spans, self.parts):
            part.lora_B = _like(whole, stop - first, whole.shape[1])
            part.lora_B.weight = nn.Parameter(whole.detach()[first:stop].clone(), whole.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        low = self.lowered(x)
        return torch.cat([part(x) + part.lora_B(low) * self.scale for part in self.parts], -1)


class RowLora(Adapted, RowLinear):
    """`RowLinear` of a layer with an adapter. Each rank has some columns of A, and all of B: what ranks add by their
    adapters is part of the sum of products.
    """

    reads_part = True

    def __init__(self, layer: LoraLinear, parts: RowParts) -> None:
        super().__init__(layer, parts)
        self.lora_A, self.lora_B = layer.lora_A, SharedLinear(layer.lora_B, parts.ranks)
        self.set_config(layer.config)

    def beside(self, x: Tensor) -> Tensor:
        return self.added(x)


class ColumnLora(Adapted, ColumnLinear):
    """`ColumnLinear` of a layer with an adapter, whose A reads the rows that the layer multiplies."""

    def __init__(self, layer: LoraLinear) -> None:
        super().__init__(layer)
        self.set_config(layer.config)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.added(x)


def split_linear(layer: nn.Linear, widths: Sequence[int]) -> SplitLinear:
    """A linear layer as several, with its adapter if it has one."""
    return SplitLora(layer, widths) if isinstance(layer, LoraLinear) else SplitLinear(layer, widths)


def row_linear(layer: nn.Linear, parts: RowParts) -> RowLinear:
    """The last product of a branch that tensor-parallel ranks share, with its adapter if it has one."""
    return RowLora(layer, parts) if isinstance(layer, LoraLinear) else RowLinear(layer, parts)


def column_linear(layer: nn.Linear) -> ColumnLinear:
    """One of the first products of a branch, made in chunks, with its adapter if it has one."""
    return ColumnLora(layer) if isinstance(layer, LoraLinear) else ColumnLinear(layer)


def add_lora(mllm: MLLM, configs: Mapping[str, LoraConfig], seed: int) -> None:
    """Give parts of a model adapters, in place: what the parts had is frozen, and the adapters learn.

    Adapters are on meta where the weights beside them are; `materialise` gives those their values later. Raises
    UserError for a module of the user's own, for a target that names no linear layer in the blocks of its part, and as
    `read_adapter` does.
    """
    for name, config in configs.items():
        module, where = mllm.backbone if name == BACKBONE else mllm.encoders[name], f"model.lora.{name}"
        root = tower(module)
        if root is None:
            raise UserError(
                f"{where}: {name!r} is a module of your own, in which Motet cannot tell which layers are called; give "
                "it adapters in its class."
            )
        module.beside_adapters = "causal_lm" if isinstance(module, Backbone) else "encoder"
        getattr(module, module.beside_adapters).requires_grad_(False)
        if isinstance(module, ModalityModule):
            module.train_encoder = True
        adapts_all = isinstance(module, ModalityModule) and getattr(module.encoder, "adapts_all", False)
        unused = _uncomputed(module, root)
        for path, layer in _chosen(root, None if adapts_all else module.blocks, config, where, unused).items():
            owner, _, key = path.rpartition(".")
            setattr(root.get_submodule(owner), key, LoraLinear(layer, config))
        plain = plain_names(root)
        adapters = {plain[key]: weight for key, weight in root.named_parameters() if is_lora(key)}
        read = {}
        if config.path is not None:
            read = read_adapter(where, config, {key: tuple(weight.shape) for key, weight in adapters.items()}, unused)
        with torch.no_grad():
            for key, weight in adapters.items():
                if not weight.is_meta:
                    weight.copy_(read[key][...] if read else drawn_lora(weight, where_of(name), key, seed))


def where_of(part: str) -> str:
    """The table of a recipe that describes a part, which is part of every seed."""
    return part if part == BACKBONE else f"encoders.{part}"


def tower(module: Backbone | ModalityModule) -> nn.Module | None:
    """The HF model of a part; None of a class of the user's own."""
    return module.causal_lm if isinstance(module, Backbone) else getattr(module.encoder, "model", None)


def drawn_lora(weight: Tensor, where: str, name: str, seed: int) -> Tensor:
    """The initial value of an adapter's weight, whole and on the CPU: A as torch draws linear layers, B is 0.

    where: the table of the recipe, part of every seed. name: of the weight in its HF model, without Blocks.
    """
    value = torch.zeros(weight.shape, device="cpu")
    if name.endswith(".lora_A.weight"):
        with seeded(seed, f"{where} {name}"):
            nn.init.kaiming_uniform_(value, a=math.sqrt(5))
    return value


def lora_layers(root: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """(name without Blocks, layer) of the layers with adapters in an HF model whose products are not split."""
    plain = plain_names(root)
    for name, layer in root.named_modules():
        if isinstance(layer, LoraLinear):
            yield plain[f"{name}.weight"].removesuffix(".weight"), layer


def _linear_in(root: nn.Module, modules: Iterable[nn.Module]) -> dict[str, tuple[str, nn.Linear]]:
    """Name in the model, Blocks included -> name without Blocks, and layer, of the linear layers of some modules."""
    inside, plain = {id(child) for module in modules for child in module.modules()}, plain_names(root)
    return {
        name: (plain[f"{name}.weight"].removesuffix(".weight"), layer)
        for name, layer in root.named_modules()
        if type(layer) in (nn.Linear, TransposedLinear) and id(layer) in inside and "weight" in layer._parameters
    }


def _uncomputed(module: Backbone | ModalityModule, root: nn.Module) -> frozenset[str]:
    """Linear layers of blocks behind the last one whose rows an encoder gives (LLaVA's); peft adapts these as well."""
    blocks = getattr(getattr(module, "encoder", None), "uncomputed", ())
    return frozenset(name for name, _ in _linear_in(root, blocks).values())


def _chosen(
    root: nn.Module, blocks: Sequence[Block] | None, config: LoraConfig, where: str, unused: Set[str]
) -> dict[str, nn.Linear]:
    """Name in the model, Blocks included -> layer, of the layers that targets name. Raises UserError.

    blocks: whose layers may have adapters; None: all layers that could learn. unused: linear layers that are not
    computed, whose adapters in a directory of peft have no effect.
    """
    linear = _linear_in(root, [root] if blocks is None else blocks)
    if not linear:
        raise UserError(
            f"{where}: {type(root).__name__} has no linear layers in its blocks, beside which adapters are; train it "
            "without them."
        )
    if config.targets == ALL_LINEAR:
        return {name: layer for name, (_, layer) in linear.items()}
    targets = [target for target in config.targets if not any(_is_target(name, target) for name in unused)]
    for target in targets if config.path else config.targets:
        if not any(_is_target(name, target) for name, _ in linear.values()):
            example = next(name for name, _ in linear.values())
            raise UserError(
                f"{where}.targets: no linear layer in the blocks of {type(root).__name__} has a name that ends with "
                f"{target!r}; a name is, for example, {example!r}"
            )
    chosen = {
        name: layer
        for name, (own, layer) in linear.items()
        if any(_is_target(own, target) for target in config.targets)
    }
    if not chosen:
        raise UserError(f"{where}.path: {config.path} has adapters of layers alone that are not computed.")
    return chosen


def _is_target(name: str, target: str) -> bool:
    return is_named(name, [target, f"*.{target}"])


def _like(weight: Tensor, rows: int, columns: int) -> nn.Linear:
    """A linear layer without a bias where a weight is, in its dtype. Its values are still to come."""
    layer = nn.Linear(columns, rows, bias=False, device="meta", dtype=weight.dtype)
    return layer if weight.is_meta else layer.to_empty(device=weight.device)
