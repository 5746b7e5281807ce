"""Towers whose items context-parallel ranks share, run in parts as stages of a pipeline do: float64, 1e-10."""

from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist

from motet.assign.item_shares import item_shares
from motet.assign.orchestrator import Decision
from motet.balance import LengthWork, Packed, PhaseCosts, score
from motet.core.workload import BACKBONE, ItemLengths
from motet.dispatch.shared_items import shared_items
from motet.models.families.shaped import ShapedVisionConfig, ShapedVisionEncoder, ShapedVisionTransformer
from motet.models.module import ModalityModule
from motet.models.projector import ProjectorConfig, build_projector
from parity.planned import TOLERANCE
from parity.tiny import DIM
from parity.towers import (
    JOINED,
    RASTERS,
    READ,
    ROW_DIM,
    SOUNDS,
    TILE,
    TOWERS,
    WIDE,
    arrangements,
    is_tiled,
    raster_sizes,
    tower_module,
)
from ranks import run_ranks

NUM_RANKS = 3
SHAPED = {"shaped": {"num_positions": 200}, "shaped, class row": {"num_positions": 200, "class_row": True}, "rope": {}}
IMAGES = [[(5, 6), (1, 1), (1, 2)], [(1, 3)]]
"""Rows and columns of blocks: a large image among small ones, which stay whole; one that two ranks of three cut."""


def module_of(tower: str, frozen: tuple[str, ...]) -> ModalityModule:
    if tower not in SHAPED:
        return tower_module(tower, frozen)
    torch.manual_seed(12)
    shape = {"hidden": 8, "mlp": 12, "num_heads": 2}
    config = ShapedVisionConfig(shape=shape, num_layers=2, row_dim=ROW_DIM, **SHAPED[tower])
    encoder = ShapedVisionEncoder(ShapedVisionTransformer(config))
    projector = build_projector(8, DIM, ProjectorConfig())
    return ModalityModule(encoder, projector, train_encoder=not frozen).to(torch.float64)


def sizes_of(tower: str, blocks: list[tuple[int, int]]) -> np.ndarray:
    sizes = np.array(blocks)
    if tower in SOUNDS:
        return 9 * sizes.prod(axis=1)[:, None]
    if tower in JOINED:
        return 2 * sizes + 1
    if tower in RASTERS:
        return raster_sizes(sizes)
    if tower in SHAPED:
        return sizes.prod(axis=1)[:, None]
    if tower in WIDE:
        return arrangements(sizes[:2])  # All are as long: of three, each of three ranks would have one.
    if is_tiled(tower):
        return np.stack([TILE * sizes.prod(axis=1), np.full(len(sizes), TILE)], axis=1)
    sizes = 2 * sizes if "qwen" in tower else sizes
    return np.insert(sizes, 0, 2, axis=1) if tower.startswith("whole") else sizes


def in_parts(module, values, sizes, shared):
    """As a stage of a pipeline runs each part."""
    hidden = module.enter(values, sizes, shared)
    graph, stops = [], sorted({0, 1, module.num_encoder_blocks, len(module.blocks)})
    for first, stop in pairwise(stops):
        taken = hidden.detach().requires_grad_(hidden.requires_grad)
        graph.append((hidden, taken))
        hidden = module.through(taken, sizes, first, stop, shared)
    taken = hidden.detach().requires_grad_(hidden.requires_grad)
    return module.leave(taken, sizes, shared), [*graph, (hidden, taken)]


def without_weights(module: ModalityModule) -> ModalityModule:
    """As a stage has the tower that holds none of its blocks."""
    bare = deepcopy(module)
    for child in bare.modules():
        child._parameters.update(dict.fromkeys(child._parameters))
    return bare


def check(rank: int, num_ranks: int, frozen: tuple[str, ...]) -> list[str]:
    wrong = []
    for tower in dict.fromkeys((*WIDE, *TOWERS, *JOINED, *RASTERS, *SOUNDS, *READ, *SHAPED)):
        for blocks in IMAGES:
            module, reference = module_of(tower, frozen), module_of(tower, frozen)
            assert module.can_share, tower
            assert bool(module.tile_rows) == tower.startswith("tiled")
            spares = (each.encoder.spare(torch.zeros(0)) for each in (module, without_weights(module)))
            assert len({(values.shape, sizes.shape) for values, sizes in spares}) == 1, tower
            sizes = sizes_of(tower, blocks)
            rng = np.random.default_rng(3)
            items = [torch.from_numpy(rng.standard_normal((rows, ROW_DIM))) for rows in module.num_values(sizes)]
            lengths, tokens = module.lengths(sizes), module.num_tokens(sizes)
            cut_rows = module.spec_module("image").cut_rows
            rows = cut_rows.num_rows(tokens, lengths)
            shares = item_shares(lengths, rows, num_ranks, can_cut=True, tile_rows=module.tile_rows)
            assert shares.cuts is not None, (tower, blocks)
            placed = score(shares.ranks, lengths, num_ranks, Packed())
            decision = Decision(
                {"image": placed, BACKBONE: placed}, {}, PhaseCosts({BACKBONE: Packed()}, LengthWork()), {}, 0.0, "off",
                item_cuts={"image": shares.cuts}, sharing={"image": num_ranks},
                cut_rows={"image": cut_rows},
            )  # fmt: skip
            of_phase = ItemLengths(np.zeros(len(tokens), np.int64), lengths, tokens)
            shared = replace(shared_items(decision, "image", of_phase, rank), group=dist.group.WORLD)
            own = decision.items_on("image", rank)
            values = torch.cat([torch.empty(0, ROW_DIM, dtype=torch.float64), *(items[item] for item in own)])
            given = torch.from_numpy(sizes[own]), shared
            rows, graph = in_parts(module, values[shared.with_rows(module.num_values(sizes[own])).own], *given)
            gradient = torch.from_numpy(rng.standard_normal((tokens.sum(), module.projector.output_dim)))
            whole = reference(torch.cat(items), torch.from_numpy(sizes))
            whole.backward(gradient)
            owner = np.concatenate(
                [
                    shares.cuts.run_owner(i, n) if i in shares.cuts.items else np.full(n, shares.ranks[i])
                    for i, n in enumerate(tokens.tolist())
                ]
            )
            starts = np.cumsum(tokens) - tokens
            mine = [starts[item] + np.flatnonzero(owner[starts[item] :][: tokens[item]] == rank) for item in own]
            mine = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *mine]))
            torch.autograd.backward(rows, gradient[mine])
            for hidden, taken in reversed(graph):
                if hidden.requires_grad:
                    hidden.backward(torch.zeros_like(taken) if taken.grad is None else taken.grad)
            errors = {"rows": (rows - whole[mine]).abs().max() if len(mine) else torch.zeros(())}
            for (name, found), expected in zip(module.named_parameters(), reference.parameters()):
                total = torch.zeros_like(found) if found.grad is None else found.grad
                dist.all_reduce(total)
                if expected.grad is not None:
                    errors[name] = (total - expected.grad).abs().max() / expected.grad.abs().max().clamp(min=1e-3)
            wrong += [f"{tower} {blocks} {name}: {error:g}" for name, error in errors.items() if not error <= TOLERANCE]
    return wrong


@pytest.mark.parametrize("frozen", [(), pytest.param(("image encoder",), marks=pytest.mark.slow)])
def test_each_tower_cut_and_in_parts_equals_itself_whole(frozen):
    assert run_ranks(check, NUM_RANKS, frozen) == [[]] * NUM_RANKS
