"""Routed experts: MLPs of which a router chooses some for each row (Mixtral, Qwen3-MoE, Qwen3-VL-MoE).

The parameters, their names and the arithmetic are those of transformers' layers. Rows are brought into the order of
their experts, so that each expert multiplies its rows at once, and back; sums are in a fixed order.

Tensor-parallel ranks have whole experts, as many each: all of them route all rows, each computes what its experts make
of these, and the sum over ranks is what one rank makes. Where ranks share experts, too, each has a part of those of an
expert-parallel rank, and exchanges rows with the ranks that have the same part of others'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from motet.core.errors import UserError
from motet.expert_ranks import ExpertRanks
from motet.grouped import GroupedLinear
from motet.models.block import Block, is_changed
from motet.models.router_loss import RouterLoss
from motet.tensor_parallel import RowParts, copied, counted_once

ROUTER_LOSS = "router_loss"
"""The keyword by which layers are given the `RouterLoss` of a pass."""


class RoutedExperts(nn.Module):
    """What computes HF's MoE block of a family in the registry, with its modules `gate` and `experts`.

    layer: the number of its layer. block: HF's, whose parameters it takes.
    ranks: those that share the experts, of which this rank has some; None: it has all.
    parts: of the tensor-parallel ranks, of whose experts this rank has some; None: no products are shared.

    Example:
        >>> from transformers import MixtralConfig
        >>> from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
        >>> config = MixtralConfig(hidden_size=4, intermediate_size=6, num_local_experts=3, num_experts_per_tok=2)
        >>> routed = RoutedExperts(0, MixtralSparseMoeBlock(config))
        >>> [(name, list(p.shape)) for name, p in routed.named_parameters()]
        [('gate.weight', [3, 4]), ('experts.gate_up_proj', [3, 12, 4]), ('experts.down_proj', [3, 4, 6])]
    """

    def __init__(self, layer: int, block: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.gate, self.experts = block.gate, block.experts
        self.product = GroupedLinear()
        # All routers but Qwen3-MoE's always divide by the sum, and Mixtral's weights alone stay in float32.
        self.normalises = getattr(block.gate, "norm_topk_prob", True)
        self.casts = not isinstance(block.gate, MixtralTopKRouter)
        self.router_loss: RouterLoss | None = None
        self.ranks: ExpertRanks | None = None
        self.parts: RowParts | None = None

    @property
    def num_experts(self) -> int:
        """The number of MLPs."""
        return self.experts.num_experts

    @property
    def experts_per_token(self) -> int:
        """How many of them compute a row."""
        return self.gate.top_k

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., width] -> the same shape. The host waits for the device once: for the rows of each expert."""
        if self.parts is None or not hidden.numel():  # Without rows there is nothing to sum.
            return self._routed(hidden, self.gate.weight)
        # Each rank's gradient of the router is that of its own experts.
        gate = copied(self.gate.weight, self.parts.ranks)
        return self.parts.from_products(self._routed(self.parts.into_products(hidden), gate))

    def _routed(self, hidden: Tensor, gate: Tensor) -> Tensor:
        """What this rank's experts make of hidden states [..., width], by a router's weight [num_experts, width]."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = linear(rows, gate)
        probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        weights, chosen = probabilities.topk(self.experts_per_token)
        if self.normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.casts:
            weights = weights.to(logits.dtype)
        mixed = self._mixed(rows, weights, chosen)
        router_loss, self.router_loss = self.router_loss, None
        if router_loss is not None:
            if self.parts is not None:
                probabilities = counted_once(probabilities, self.parts.ranks)
            mixed = router_loss.through(self.layer, mixed, probabilities, chosen)
        return mixed.view(hidden.shape)

    def _mixed(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Rows [n, width] through their experts, weighed. weights, chosen: [n, experts_per_token]."""
        experts, order = chosen.view(-1).sort(stable=True)
        # bincount would make the host wait twice.
        counts = torch.searchsorted(experts, torch.arange(self.num_experts + 1, device=experts.device)).diff()
        index, tp = (0, 1) if self.parts is None else (self.parts.ranks.index, self.parts.ranks.size)
        ep = 1 if self.ranks is None else self.ranks.size
        # Of the experts of each expert-parallel rank, every tensor-parallel one has as many.
        shape = ep, tp, self.num_experts // tp // ep
        arriving = own = counts.view(shape)[:, index]
        if self.ranks is not None:
            arriving = self.ranks.arriving(own)
        on_host = torch.cat([counts, arriving.reshape(-1)]).cpu().numpy()  # The host waits here alone.
        of_experts, arrived = on_host[: self.num_experts].reshape(shape), on_host[self.num_experts :].reshape(ep, -1)
        if tp > 1:
            runs = order.split(of_experts.sum(-1).ravel().tolist())
            order = torch.cat(runs[index::tp])
        given = rows[order // self.experts_per_token]
        if self.ranks is None:
            made = self._multiplied(given, arrived[0].tolist())
        else:
            sent = of_experts[:, index].sum(1).tolist()
            made = self.ranks.through(given, sent, arriving, arrived, self._multiplied)
        weighed = (made * weights.view(-1)[order][:, None]).to(rows.dtype)
        every = weighed.new_zeros(chosen.numel(), rows.shape[1]).index_copy(0, order, weighed)
        return every.view(*chosen.shape, rows.shape[1]).sum(1)

    def _multiplied(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows in the order of this rank's experts, of which each has counts[expert], through them. The same shape."""
        gate, up = self.product(rows, self.experts.gate_up_proj, counts).chunk(2, -1)
        return self.product(self.experts.act_fn(gate) * up, self.experts.down_proj, counts)


def use_routed_experts(layers: Any) -> int:
    """Replace HF's MoE blocks in layers of a model, in place, if it is not done yet; returns how many there are.

    In a model with experts, all layers take `ROUTER_LOSS` as a keyword, those without one too.
    Raises UserError for a block that computes something else than HF's.
    """
    routed = [number for number, layer in enumerate(layers) if hasattr(getattr(layer, "mlp", None), "experts")]
    if routed and not isinstance(layers[routed[0]].mlp, RoutedExperts):
        for number in routed:
            _check_is_hf(number, layers[number].mlp)
            layers[number].mlp = RoutedExperts(number, layers[number].mlp)
        for layer in layers:
            layer.register_forward_pre_hook(_take_router_loss, with_kwargs=True)
    return len(routed)


def _check_is_hf(number: int, block: Any) -> None:
    """Raise UserError for what a user has put into a MoE block, or set on it: all but its parameters is replaced."""
    for module in (block, block.experts, getattr(block, "gate", None)):
        name = type(module).__name__
        if not type(module).__module__.startswith("transformers.models."):
            raise UserError(
                f"The experts of layer {number} have a {name}, and only those of a family's own can be trained."
            )
        if is_changed(module):
            raise UserError(
                f"The {name} of layer {number} has a hook or a forward of its own, and experts run without it: "
                "remove it, or set it on the layer."
            )


def expert_parameters(blocks: Iterable[nn.Module | Block]) -> Iterator[nn.Parameter]:
    """The parameters of all experts in some blocks, each [num_experts, ...]."""
    for block in blocks:
        if (routed := _routed(block)) is not None:
            yield from routed.experts.parameters()


def spread_experts(blocks: Iterable[Block], ranks: ExpertRanks) -> None:
    """Let the experts of some blocks, of which this rank has a part, compute rows of all these ranks. In place."""
    for block in blocks:
        if (routed := _routed(block)) is not None:
            routed.ranks = ranks
            block.without_rows = partial(RoutedExperts.__call__, routed)


def divide_experts(layers: Iterable[nn.Module], parts: RowParts) -> None:
    """Let the experts of some layers, of which this tensor-parallel rank has a part, compute all rows. In place."""
    for layer in layers:
        if (routed := _routed(layer)) is not None:
            routed.parts = parts


def _routed(block: nn.Module | Block) -> RoutedExperts | None:
    """The experts of a block, or of a layer; None if it has none, as blocks of shapes, which have no `mlp` either."""
    mlp = getattr(block, "mlp", None)
    return mlp if isinstance(mlp, RoutedExperts) else None


def _take_router_loss(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a layer's experts what else its attention would be given."""
    router_loss = kwargs.pop(ROUTER_LOSS, None)
    if isinstance(layer.mlp, RoutedExperts):
        layer.mlp.router_loss = router_loss
    return args, kwargs
