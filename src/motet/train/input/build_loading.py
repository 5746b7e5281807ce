"""How the microbatches of a recipe are loaded where ranks have the whole model: by index, or exchanged."""

from __future__ import annotations

import os

from motet.core.errors import UserError
from motet.data.decode import Decoder
from motet.data.examples import Examples
from motet.data.splits import OwnSplits
from motet.dispatch import Carrier, ItemExchange, Orchestrator
from motet.models.mllm import MLLM
from motet.runtime.mesh import Mesh, of_other_examples
from motet.train.input.loading import ExchangeLoading, IndexLoading, Loading
from motet.train.recipe.recipe import Recipe
from motet.train.world import World


def check_transport(recipe: Recipe, world: World) -> None:
    """Raise UserError where inputs cannot move over the links of the devices."""
    if recipe.balance.transport == "host":
        return
    if world.device.type == "cpu":
        raise UserError(
            'balance.transport = "device" moves inputs over the links of GPUs, and this run is on the CPU; remove it.'
        )
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise UserError(
            'balance.transport = "device" with CUDA_DEVICE_MAX_CONNECTIONS=1 can end in a deadlock: one queue makes an '
            "exchange of inputs wait for a collective of the step; remove it, or unset the variable."
        )


def build_loading(
    recipe: Recipe,
    mesh: Mesh,
    orchestrator: Orchestrator,
    dataset: Examples | OwnSplits,
    decoder: Decoder,
    model: MLLM,
) -> Loading:
    """The way in which the recipe's microbatches are loaded."""
    if recipe.exchanges_items:
        exchange = ItemExchange(mesh.host_group, orchestrator, model.measured, carrier=_carrier(recipe, mesh))
        return ExchangeLoading(dataset, decoder, exchange)
    assert not isinstance(dataset, OwnSplits), "a recipe whose examples are split exchanges items"
    return IndexLoading(dataset, decoder, orchestrator, mesh.rank)


def _carrier(recipe: Recipe, mesh: Mesh) -> Carrier:
    """What moves the bytes of inputs between ranks. A collective."""
    if recipe.balance.transport == "host":
        return Carrier(mesh.host_group)
    # A new group has a communicator of its own. That of the step belongs to the training thread.
    return Carrier(of_other_examples(mesh.tensor_size, backend="nccl"), mesh.device)
