"""Models whose products tensor-parallel ranks share: which parameters are cut, and how layers change.

A family of the registry says how its layers are divided (`TensorBranch`). Embedding and output layer of a backbone are
cut by the vocabulary, and an MLP between encoder and backbone by its inner columns. Of routed experts each rank has
some, whole, and all of their router. What a family computes as one
product of several (queries, keys and values) is split first (`fused.py`). All else (norms, patch embeddings,
convolutions, position tables, other projectors) is whole on every rank, and computed by each of them. Between branches
each rank has a part of the rows (`RowParts`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.internvl.modeling_internvl import InternVLVisionAttention
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from motet.chunked import ColumnProducts
from motet.core.workload import BACKBONE
from motet.dropout import set_divided
from motet.models.backbone import Backbone
from motet.models.block import Block, is_changed, is_compiled
from motet.models.dit import DiT
from motet.models.exact import Float64RMSNorm
from motet.models.experts import RoutedExperts, divide_experts, expert_parameters
from motet.models.families.branches import (
    DIT_BRANCHES,
    PIXART_BRANCHES,
    SD3_BRANCHES,
    SHAPED_BRANCHES,
    TensorBranch,
)
from motet.models.families.registry import (
    BACKBONES,
    CROSS_BACKBONES,
    ENCODERS,
    GRID_BACKBONES,
    SHAPED_BACKBONE,
    SHAPED_ENCODERS,
    TOWERS,
)
from motet.models.families.shaped_denoiser import ShapedDenoiser
from motet.models.families.shaped_layer import ShapedRMSNorm
from motet.models.fused import SplitLinear
from motet.models.generator import GeneratorModule
from motet.models.lora import Adapted, LoraLinear, column_linear, row_linear, split_linear
from motet.models.mllm import MLLM
from motet.models.module import ModalityModule
from motet.models.pixart import PixArt
from motet.models.projector import Projector
from motet.models.sd3 import SD3
from motet.tensor_parallel import (
    RowParts,
    SharedLinear,
    TensorRanks,
    copied,
    divide_norm,
    divide_vocabulary,
    sum_gradients,
    with_copies,
)
from motet.transposed import TransposedLinear, is_transposed

_DividedModule: TypeAlias = ModalityModule | Backbone | GeneratorModule
_ROW_NORMS = Olmo2RMSNorm, ShapedRMSNorm, Float64RMSNorm
"""Norms of rows of all heads, of which `divide_norm` takes the mean over ranks."""
_CHANGED = "has a hook, a forward or a parametrization of its own"
_PROJECTOR = (TensorBranch("", ("layers.0",), "layers.2"),)


def why_undivided(mllm: MLLM, name: str) -> str:
    """Why tensor-parallel ranks cannot share the layers of a module, in words; "" if they can."""
    module = _module(mllm, name)
    model = _tower(module)
    if not _branches_of(model):
        return f"Motet knows no way to divide the layers of {type(model).__name__}"
    for block in _layers(module):
        shape = getattr(block, "shape", None)
        if shape is not None and shape.qk_norm_rows and shape.norm == "layer":
            return f"{type(model).__name__} centres queries and keys over all heads"
    for root, branch in _branches(module):
        first = (branch.fused,) if branch.fused else branch.columns
        for path in (*first, *branch.beside, *branch.rows):
            if (product := _at(root, path)) is not None and (why := _why_not_linear(product)):
                return f"{path} {why}"
        for path in _row_norm_paths(root, branch):
            if not isinstance(norm := _at(root, path), _ROW_NORMS):
                return f"{path} is a {type(norm).__name__} of all heads, and not the family's own, and ranks have some"
        for path in (*branch.head_norms, *branch.row_norms):
            if (norm := _at(root, path)) is not None and is_changed(norm):
                return f"{path} {_CHANGED}, and each rank has some of the heads that it norms"
    if path := next((path for path, each in model.named_modules() if path and is_compiled(each)), ""):
        return f"{path} is compiled, and ranks meet in it"
    for root in dict.fromkeys((*_layers(module), *(root for root, _ in _branches(module)))):
        for path, each in root.named_modules():
            # One without weights, as an activation, may be called with inner columns.
            if not each._parameters and not each._modules and is_changed(each):
                return f"{path} {_CHANGED}, and each rank may have a part of what it is called with"
    if isinstance(module, Backbone) and (why := _why_not_by_tokens(module)):
        return why
    if unknown := _unknown_parameter(mllm, name):
        return f"{unknown} of a layer is in no product or norm of the family's, and ranks would not sum its gradient"
    return ""


def _why_not_linear(product: nn.Module) -> str:
    """What a product is that ranks cannot share, in words; "" if it is one of torch's or of Motet's."""
    kind, each_has = type(product), "and each rank has a part of its product"
    if not isinstance(product, nn.Linear | SplitLinear):
        return f"is a {kind.__name__}, as another package puts it there, and not torch's"
    if is_changed(product):
        return f"{_CHANGED}, {each_has}"
    is_known = isinstance(product, SplitLinear | LoraLinear | TransposedLinear) or kind.forward is nn.Linear.forward
    return "" if is_known else f"is a {kind.__name__} with another forward than torch's Linear, {each_has}"


def _why_not_by_tokens(backbone: Backbone) -> str:
    """Why ranks cannot share the embedding and the output layer of a backbone by tokens, in words; "" if they can.

    Hooks on the embedding, and on the last norm, see whole rows.
    """
    table, head = _vocabulary(backbone)
    if why := _why_not_linear(head):
        return f"the output layer {why}"
    if is_parametrized(table) or "forward" in vars(table):
        return f"the embedding of tokens {_CHANGED}, and each rank has the rows of some tokens"
    if not type(table).__module__.startswith(("torch.", "transformers.")):
        return f"the embedding of tokens is a {type(table).__name__}, and each rank has the rows of some tokens"
    if is_parametrized(backbone.text.norm):
        return f"the last norm {_CHANGED}, and ranks would not sum its gradient"
    return ""


def split_fused(mllm: MLLM, names: Iterable[str]) -> None:
    """Split the products of these modules that their family computes as one, in place; the values stay.

    Comes before `cuts_of` and `divide`, on all ranks alike, as it changes names of parameters.
    """
    for name in names:
        for root, branch in _branches(_module(mllm, name)):
            if branch.fused and isinstance(whole := _at(root, branch.fused), nn.Linear):
                first = _at(root, branch.row).in_features
                others = len(branch.columns) - 1
                rest = (whole.out_features - first) // others
                owner, name_there = _owner(root, branch.fused)
                setattr(owner, name_there, split_linear(whole, [first] + [rest] * others))


def cuts_of(mllm: MLLM, name: str) -> dict[str, int]:
    """Name in the model -> the dimension in which tensor-parallel ranks cut a parameter, of those of a module."""
    cuts: dict[int, int] = {}
    for root, branch in _branches(_module(mllm, name)):
        for path in (*branch.columns, *branch.beside):
            if (column := _at(root, path)) is not None:
                # A of an adapter is whole on all ranks.
                named = column.named_parameters()
                cuts |= {id(parameter): 0 for name, parameter in named if not name.startswith("lora_A.")}
                cuts |= {id(column.weight): int(is_transposed(column))}
        for norm in _row_norms(root, branch):
            cuts |= {id(parameter): 0 for parameter in norm.parameters()}
        for row in filter(None, (_at(root, path) for path in branch.rows)):
            cuts[id(row.weight)] = 1 - int(is_transposed(row))
            if isinstance(row, LoraLinear):
                cuts[id(row.lora_A.weight)] = 1
    cuts |= {id(parameter): 0 for parameter in expert_parameters(_layers(_module(mllm, name)))}
    if name == BACKBONE:
        for part in _vocabulary(mllm.backbone):
            cuts |= {id(parameter): 0 for parameter in part.parameters()}
    return {name: cuts[id(parameter)] for name, parameter in mllm.named_parameters() if id(parameter) in cuts}


def divide(mllm: MLLM, ranks: Mapping[str, TensorRanks], whole_rows: Container[str] = ()) -> None:
    """Change a model's layers, in place, to those of this rank. Parameters that `cuts_of` names are cut elsewhere.

    mllm: may be a part (`part.py`), with its parameters or before it has them. ranks: module -> those that share it.
    whole_rows: the encoders of which all ranks have all rows between branches (`PlannedStage.has_sums`).
    """
    for name, of_module in ranks.items():
        module, parts = _module(mllm, name), RowParts(of_module)
        branches = _branches_of(_tower(module))
        for block in _layer_blocks(module):
            _share_norms(block, branches, parts)
        if isinstance(module, ModalityModule) and name not in whole_rows:
            _part_rows(module.encoder, parts)
        for root, branch in _branches(module):
            if _at(root, branch.row).weight is not None:
                _divide_branch(root, branch, parts)
        divide_experts(_layers(module), parts)
        if not isinstance(module, GeneratorModule):
            module.row_parts = parts
        if isinstance(module, Backbone):
            sum_gradients(module.text.norm, parts.shared)
            divide_vocabulary(module.text.table, of_module)
        for block in _layer_blocks(module):
            block.held = parts.held


def _part_rows(encoder: Any, parts: RowParts) -> None:
    """Let the layers of an encoder run on parts of the rows; what it names in `on_all_rows` stands between them."""
    encoder.through = partial(parts.in_parts, encoder.through)
    for name in getattr(encoder, "on_all_rows", ()):
        setattr(encoder, name, partial(parts.on_all_rows, getattr(encoder, name)))


def _share_norms(block: Block, branches: Sequence[TensorBranch], parts: RowParts) -> None:
    """Norms of whole rows, and factors of rows: the parameters of a layer that are in no branch."""
    layer = block.inner
    for module in _row_modules(layer, branches):
        if any(parameter is not None for parameter in module._parameters.values()):
            sum_gradients(module, parts.shared)
            if module is layer and block.halves:  # They run without its forward.
                first, second = (with_copies(layer, half, parts.shared) for half in block.halves)
                block.halves = first, second


def _row_modules(layer: nn.Module, branches: Sequence[TensorBranch]) -> list[nn.Module]:
    """A layer, and of its children those that are no products and in no branch."""
    head_norms = [_at(layer, path) for branch in branches for path in (*branch.head_norms, *branch.row_norms)]
    return [each for each in (layer, *layer.children()) if not isinstance(each, nn.Linear) and each not in head_norms]


def _unknown_parameter(mllm: MLLM, name: str) -> str:
    """A parameter of a layer that ranks neither cut nor have whole, with a gradient that they sum; "" if there is none.

    Of generators further products are whole on every rank, which all compute from what they all have.
    """
    module = _module(mllm, name)
    if isinstance(module, GeneratorModule):
        return ""
    layers, branches = _layers(module), _branches_of(_tower(module))
    shared = {id(p) for layer in layers for each in _row_modules(layer, branches) for p in each._parameters.values()}
    shared |= {
        id(p)
        for layer in layers
        for each in layer.modules()
        if isinstance(each, RoutedExperts)
        for p in each.parameters()
    }
    for root, branch in _branches(module):
        paths = *branch.columns, *branch.beside, *branch.rows, *branch.head_norms, *branch.row_norms, branch.fused
        parts = (_at(root, path) for path in paths if path)
        shared |= {id(p) for part in parts if part is not None for p in part.parameters()}
    found = (path for layer in layers for path, p in layer.named_parameters() if id(p) not in shared)
    return next(found, "")


def _divide_branch(root: nn.Module, branch: TensorBranch, parts: RowParts) -> None:
    ranks = parts.ranks
    columns, beside = (_columns(root, paths, is_chunked=ranks.chunks > 1) for paths in (branch.columns, branch.beside))
    into_products, into_beside = (
        ColumnProducts(parts, products).of if ranks.chunks > 1 and products else parts.into_products
        for products in (columns[:1] if branch.keys else columns, beside)
    )
    owner = _at(root, branch.inputs) if branch.inputs else _owner(root, branch.row)[0]
    if branch.norm:
        _at(root, branch.norm).register_forward_hook(lambda module, args, output: into_products(output))
    else:
        owner.register_forward_pre_hook(partial(_with_products, into_products, into_beside), with_kwargs=True)
    for norm in _head_norms(root, branch):
        sum_gradients(norm, partial(copied, ranks=ranks))
    for norm, column in zip(_row_norms(root, branch), columns):
        divide_norm(norm, column.out_features, ranks)
    first_column = ranks.part(columns[0].out_features)[0]
    first_head = first_column // _head_dim(owner) if branch.has_heads else 0
    if branch.keys:
        owner.register_forward_pre_hook(partial(_with_keys, branch.keys, ranks), with_kwargs=True)
        root.forward = partial(parts.on_all_rows, root.forward)
    for adapted in (*columns, _at(root, branch.fused) if branch.fused else None):
        if isinstance(adapted, Adapted):
            adapted.lora_A = SharedLinear(adapted.lora_A, ranks)
    columns[0].register_forward_hook(lambda module, args, output: set_divided(first_head, first_column))
    if branch.has_heads:
        _count_heads(owner, ranks.size, reads_config=bool(branch.fused))
    for path in branch.rows:
        if (row := _at(root, path)) is not None:
            setattr(*_owner(root, path), row_linear(row, parts))


def _columns(root: nn.Module, paths: Sequence[str], is_chunked: bool) -> list[Any]:
    """The first products at these paths that there are. is_chunked: they are replaced by those made in chunks."""
    paths = [path for path in paths if _at(root, path) is not None]
    for path in paths if is_chunked else ():
        setattr(*_owner(root, path), column_linear(_at(root, path)))
    return [_at(root, path) for path in paths]


def _with_products(
    into_products: Callable[[Tensor], Tensor],
    into_beside: Callable[[Tensor], Tensor],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a module is called with, its first argument, and what is given beside, as its first products multiply it."""
    if (given := kwargs.get("encoder_hidden_states")) is not None:
        kwargs = {**kwargs, "encoder_hidden_states": into_beside(given)}
    if args:
        return (into_products(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": into_products(kwargs["hidden_states"])}


def _with_keys(
    name: str, ranks: TensorRanks, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a module is called with, its keys as this rank's products multiply them."""
    return args, {**kwargs, name: copied(kwargs[name], ranks)}


def _count_heads(attention: Any, num_ranks: int, reads_config: bool) -> None:
    """Let an attention know how many heads it has here. reads_config: from its config, of which it gets its own."""
    for name in ("num_heads", "num_attention_heads", "num_key_value_heads", "heads"):
        if hasattr(attention, name):
            setattr(attention, name, getattr(attention, name) // num_ranks)
    if isinstance(attention, GPT2Attention):  # It splits queries, keys and values by this width.
        attention.split_size //= num_ranks
    if isinstance(attention, InternVLVisionAttention):  # It reads the width of its heads together by this name.
        attention.embed_dim //= num_ranks
    if reads_config and hasattr(attention, "config"):
        attention.config = copy(attention.config)
        attention.config.num_attention_heads //= num_ranks


def _head_norms(root: nn.Module, branch: TensorBranch) -> list[nn.Module]:
    """Norms of single heads in a branch."""
    return [] if _norms_rows(root) else [norm for path in branch.head_norms if (norm := _at(root, path)) is not None]


def _row_norms(root: nn.Module, branch: TensorBranch) -> list[nn.Module]:
    """Norms of all heads together in a branch, in the order of the first products."""
    return [_at(root, path) for path in _row_norm_paths(root, branch)]


def _row_norm_paths(root: nn.Module, branch: TensorBranch) -> tuple[str, ...]:
    return branch.head_norms if _norms_rows(root) else branch.row_norms


def _norms_rows(root: nn.Module) -> bool:
    """Whether a layer of shapes normalises queries and keys over all heads."""
    return getattr(getattr(root, "shape", None), "qk_norm_rows", False)


def _head_dim(attention: Any) -> int:
    if hasattr(attention, "inner_dim"):  # Of diffusers.
        return attention.inner_dim // attention.heads
    return attention.shape.head_width if hasattr(attention, "shape") else attention.head_dim


def _branches(module: _DividedModule) -> Iterator[tuple[nn.Module, TensorBranch]]:
    """(the module in which a branch is, the branch)."""
    branches = _branches_of(_tower(module))
    for layer in _layers(module) if branches else ():
        yield from ((layer, branch) for branch in branches if _at(layer, branch.row) is not None)
    if (
        isinstance(module, ModalityModule)
        and isinstance(module.projector, Projector)
        and module.projector.kind == "mlp"
        and module.projector.norm is None
        and not isinstance(module.projector.layers[0], nn.LayerNorm)
    ):
        yield from ((module.projector, branch) for branch in _PROJECTOR)


def _tower(module: _DividedModule) -> nn.Module:
    """The HF model, an encoder of another class, or what denoises."""
    if isinstance(module, GeneratorModule):
        return getattr(module.generator, "denoiser", module.generator)
    return module.causal_lm if isinstance(module, Backbone) else getattr(module.encoder, "model", module.encoder)


def _layers(module: _DividedModule) -> list[nn.Module]:
    """The transformer layers, without the Blocks around them and without those of a projector."""
    return [block.inner for block in _layer_blocks(module)]


def _layer_blocks(module: _DividedModule) -> Sequence[Block]:
    """The Blocks around the transformer layers."""
    return module.blocks[: module.num_encoder_blocks] if isinstance(module, ModalityModule) else module.blocks


def _vocabulary(backbone: Backbone) -> tuple[nn.Module, nn.Module]:
    return backbone.text.table, backbone.causal_lm.lm_head


def _branches_of(model: nn.Module) -> tuple[TensorBranch, ...]:
    """How a layer of a model of exactly this class is divided; () if in no way that is known."""
    denoisers = {DiT: DIT_BRANCHES, ShapedDenoiser: SHAPED_BRANCHES, SD3: SD3_BRANCHES, PixArt: PIXART_BRANCHES}
    if type(model) in denoisers:
        return denoisers[type(model)]
    encoders = (*ENCODERS.values(), *TOWERS.values(), *SHAPED_ENCODERS.values())
    backbones = (*BACKBONES.values(), *GRID_BACKBONES.values(), *CROSS_BACKBONES.values(), SHAPED_BACKBONE)
    known = (*backbones, *encoders)
    return next((family.branches for family in known if type(model) is family.model), ())


def _module(mllm: MLLM, name: str) -> _DividedModule:
    if name in mllm.generators:
        return mllm.generators[name]
    return mllm.backbone if name == BACKBONE else mllm.encoders[name]


def _owner(root: nn.Module, path: str) -> tuple[Any, str]:
    """The module in which the last name of a path is, and that name."""
    owner, _, name = path.rpartition(".")
    return (_at(root, owner) if owner else root), name


def _at(root: nn.Module, path: str) -> Any:
    """The submodule at a path; None where a layer of this shape has none."""
    found: Any = root
    for name in path.split("."):
        found = getattr(found, name, None)
    return found
