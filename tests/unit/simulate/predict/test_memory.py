"""What each rank of the cluster holds, against a walk over its own actions and its own layers."""

import math
from dataclasses import replace

import numpy as np
import pytest

from motet.assign.context_rows import moved_rows
from motet.core.plan import Unit
from motet.core.spec import ModelSpec, Module
from motet.cost.memory import mixed_precision, parameters_of_rank, state_bytes, updated_of_rank
from motet.schedule import Kind, coarse_fills, fillable, planned
from motet.schedule.plan_units import units_in_bubbles
from motet.simulate.predict.memory import MAX_LOGITS, memory_of
from motet.simulate.predict.predict import assign_batch
from motet.simulate.predict.stage_pricing import Pricing
from unit.simulate.jobs import (
    CHAIN,
    MODELS,
    PLANS,
    WHOLE,
    Linear,
    alike,
    colocated,
    kept_a_row,
    lengths,
    moved_and_copied,
    num_islands,
    of,
    plan,
    rows_of,
    taken_bytes_of,
)


def memory(made, batch=None):
    cost = Linear(made.cluster)
    batch = lengths(made.batch_size) if batch is None else batch
    return memory_of(Pricing(made, planned(made), assign_batch(made, batch, cost), cost))


def state_of(made, rank):
    """(parameters, gradients, optimizer) of a rank of the cluster, by where it lies in each unit."""
    total = np.zeros(3, dtype=np.int64)
    precision = mixed_precision(made.precision, pipeline=made.schedule != "data_parallel")
    for unit in made.units:
        p = (rank - unit.first_rank) // (unit.dp * unit.cp * unit.tp)
        if not 0 <= p < unit.pp:
            continue
        blocks = [(name, number, 1) for name in unit.modules for number in _held(made, unit, p, name)]
        blocks += [
            (name, number, unit.pp) for name in unit.replicated for number in range(len(made.model.module(name).blocks))
        ]
        for name, number, copies in blocks:
            module = made.model.module(name)
            for place in module.blocks[number]:
                layer = module.layers[place]
                cut = layer.divided_parameters
                size = layer.parameters - cut + math.ceil(cut / unit.tp)
                total += state_bytes(
                    size,
                    size * layer.trainable,
                    precision=precision,
                    zero=0 if unit.shard_size == 1 else unit.zero,
                    shard_ranks=unit.shard_size or unit.dp * unit.cp * copies,
                )
    return total.tolist()


def _held(made, unit, p, name):
    first = 0
    for number, stage in enumerate(unit.stages):
        on = 2 * unit.pp - 1 - number if made.schedule == "zb_v" and number >= unit.pp else number % unit.pp
        if on == p:
            yield from range(first, first + stage.get(name, 0))
        first += stage.get(name, 0)


def activations_of(made, found, batch, rank):
    """The most that a rank holds at a time, action by action."""
    islands = num_islands(made, found.stages)
    first = 0
    for unit in made.units:
        if unit in units_in_bubbles(made):
            continue
        place, in_island = (rank - unit.first_rank) // (unit.cp * unit.tp), unit.dp // islands
        if 0 <= place < unit.dp * unit.pp:
            p, d = divmod(place, unit.dp)
            program_rank, island = first + d % in_island * unit.pp + p, d // in_island
            break
        first += in_island * unit.pp
    else:
        return 0.0
    level = most = 0.0
    row = found.program.actions[program_rank]
    ends = {(a.stage, a.microbatch): number for number, a in enumerate(row) if a.kind in (Kind.B, Kind.W)}
    for number, action in enumerate(row):
        stage, i = found.stages[action.stage], action.microbatch
        if action.kind is Kind.F and action.part < 1 and (action.stage, i) in ends:
            level += _held_bytes(made, batch, stage, island, i, islands)
            most = max(most, level)
        if ends.get((action.stage, i)) == number:
            level -= _held_bytes(made, batch, stage, island, i, islands)
    assert abs(level) < 1e-6
    return most


def _held_bytes(made, batch, stage, island, i, islands):
    return taken_bytes_of(made, batch, stage, island, i, islands) + sum(
        rows_of(made, batch, name, layer, stage, island, i, islands) * kept
        + (kept == saved) * moved_and_copied(made, batch, name, layer, stage, island, i, islands)[1]
        for name, layer, has_backward, kept, saved in kept_a_row(made, stage)
        if has_backward
    )


def transient_of(made, found, batch, stage):
    """Of the layer of a stage that works with most, in the largest microbatch of any replica; without ZeRO 2 and 3."""
    islands, most = num_islands(made, found.stages), 0
    alike = [one for one in found.stages if (one.unit.name, one.index) == (stage.unit.name, stage.index)]
    for name, layer, has_backward, kept, saved in kept_a_row(made, stage):
        rows, copied = (
            max(
                figure(made, batch, name, layer, one, island, i, islands)
                for one in alike
                for island in range(islands)
                for i in range(found.program.num_microbatches)
            )
            for figure in (rows_of, lambda *args: moved_and_copied(*args)[1])
        )
        gradients = layer.output_width * ((2 + 4 + 4) / stage.unit.tp if layer.targets_only else 2 + 2)
        working = rows * (saved - kept + has_backward * gradients)
        # Copies of other ranks' rows, which a recomputed layer does not keep, and two buffers of their size.
        most = max(most, working + copied * (2 + (kept < saved)))
    return most


@pytest.mark.parametrize("longer", [1, 30])
@pytest.mark.parametrize("learns", ["all learns", "encoders frozen"])
@pytest.mark.parametrize("name", [name for name in PLANS if name not in ("data parallel", "replicated")])
def test_what_the_largest_layer_of_a_ranks_stages_works_with_comes_on_top(name, learns, longer):
    made, batch = of(MODELS[learns], PLANS[name]), lengths()
    batch.items["audio"].length[:] *= longer
    found, transient = planned(made), memory(made, batch)["transient"]
    for number in range(found.program.num_ranks):
        own = [stage for stage in found.stages if stage.rank == number]
        most = max(transient_of(made, found, batch, stage) for stage in own)
        assert transient[own[0].ranks[0]] == pytest.approx(most, abs=4)


@pytest.mark.parametrize("learns", ["all learns", "encoders frozen", "backbone frozen"])
@pytest.mark.parametrize("name", PLANS)
def test_every_rank_holds_its_layers_and_what_is_in_flight(name, learns):
    made, batch = of(MODELS[learns], PLANS[name]), lengths()
    found, parts = planned(made), memory(made, batch)
    for rank in range(made.cluster.num_ranks):
        state = [parts[part][rank] for part in ("parameters", "gradients", "optimizer")]
        assert state == state_of(made, rank), rank
        assert parts["activations"][rank] == pytest.approx(activations_of(made, found, batch, rank), abs=1), rank


def test_ranks_beside_the_plan_hold_nothing():
    made = plan(Unit("all", (WHOLE,), first_rank=5, dp=2))
    parts = memory(made)
    assert list(parts) == ["parameters", "gradients", "optimizer", "activations", "transient"]
    assert all(np.flatnonzero(held).tolist() == [5, 6] for held in parts.values())


def test_what_is_frozen_has_no_gradients():
    made = of(MODELS["backbone alone learns"], PLANS["modality parallel"])
    parts = memory(made)
    for part in ("gradients", "optimizer", "activations"):
        assert not parts[part][:5].any() and parts[part][5:9].all()
    assert parts["parameters"][:9].all()


def test_recomputation_holds_less():
    made = plan(Unit("all", CHAIN, pp=3))
    again = plan(Unit("all", CHAIN, pp=3, recompute=CHAIN))
    assert (memory(again)["activations"][:3] < 0.5 * memory(made)["activations"][:3]).all()


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_context_parallel_ranks_share_rows_and_what_comes_with_them(cp):
    """Beside their share of the rows they keep, in each of 8 layers, keys and values of rows that others have."""
    batch = replace(lengths(), items={name: column.take(np.arange(0)) for name, column in lengths().items.items()})
    alone, shared = (
        memory(plan(Unit("all", ({"image": 4, "audio": 3, "backbone": 8},), cp=n)), batch) for n in (1, cp)
    )
    copies = 16 * 2 * 2 * max(moved_rows(batch.sequence[[n]], cp)[0] for n in range(16)) if cp > 1 else 0
    more = shared["activations"][0] - alone["activations"][0] / cp
    assert more == pytest.approx(8 * copies, rel=1e-3, abs=1)


def test_one_image_is_whole_on_one_of_the_ranks_that_share_its_sequence():
    batch = alike(16, image=4000, audio=8, tokens=24)
    alone, shared = (
        memory(
            plan(Unit("image", ({"image": 4},), cp=n), Unit("llm", ({"audio": 3, "backbone": 8},), first_rank=n)), batch
        )
        for n in (1, 4)
    )
    assert shared["activations"][0] == alone["activations"][0]
    assert shared["transient"][0] == alone["transient"][0]


def test_one_image_that_ranks_can_share_takes_its_share_and_copies_of_keys_on_each_of_them():
    batch = alike(16, image=4000, audio=8, tokens=24)
    spec = MODELS["all learns"]
    spec = replace(spec, modules=tuple(replace(each, shareable=each.name == "image") for each in spec.modules))
    alone, shared = (
        memory(
            plan(
                Unit("image", ({"image": 4},), cp=n),
                Unit("llm", ({"audio": 3, "backbone": 8},), first_rank=n),
                spec=spec,
            ),
            batch,
        )
        for n in (1, 4)
    )
    assert 0.25 < shared["activations"][0] / alone["activations"][0] < 0.6


def test_a_stage_works_with_what_its_largest_microbatch_needs():
    """Of the last stage: logits, with their float32 copies, or a block's saved rows that it does not keep."""
    made, batch = plan(Unit("all", ({"image": 4, "audio": 3, "backbone": 7}, {"backbone": 1}), pp=2)), lengths()
    most = int(batch.num_targets.max())
    logits = most * 100 * (2 + 4 + 4)
    between = int(batch.sequence.max()) * 32 * 2 * 2
    assert memory(made, batch)["transient"][1] == max(logits, between)


def test_logits_exist_in_slices():
    vocabulary = 1 << 20
    module = MODELS["all learns"].module("backbone")
    head = replace(module.layers[-1], output_width=vocabulary)
    spec = ModelSpec("wide", (Module.of("backbone", (*module.layers[:-1], head)),), ())
    made, batch = plan(Unit("all", ({"backbone": 8},)), spec=spec, batch_size=1), alike(1)
    targets = np.array([1000])
    assert memory(made, replace(batch, num_targets=targets))["transient"][0] == MAX_LOGITS * (2 + 4 + 4)
    targets = np.array([100])
    assert memory(made, replace(batch, num_targets=targets))["transient"][0] == 100 * vocabulary * (2 + 4 + 4)


def test_what_passes_in_parts_make_whole_is_there_beside_other_passes():
    """Of encoders in bubbles that gather and reduce in each microbatch (ZeRO 3)."""
    one_by_one = PLANS["encoders together in bubbles"]
    backbone, encoders = one_by_one.units
    made = replace(one_by_one, units=(backbone, replace(encoders, zero=3)))
    in_parts = replace(made, fills=tuple(
        replace(fill, action=f"{fill.action}.{part}")
        for fill in coarse_fills(fillable(made)[0].program, fillable(made)[1]) for part in range(2)
    ))  # fmt: skip
    batch = alike(made.batch_size)
    batch.sequence[:] *= 1000  # So that the backbone works with most.
    whole, parts, others = (memory(one, batch)["transient"] for one in (made, in_parts, one_by_one))
    precision = mixed_precision(made.precision, pipeline=True)
    for stage in planned(made).stages[-encoders.pp :]:
        modules = ((made.model.module(name), span) for name, span in stage.layers.items())
        layers = [module.layers[index] for module, span in modules for index in module.block_layers(*span)]
        gathered = sum(parameters_of_rank(layer, 1) * precision.compute for layer in layers)
        gathered += sum(updated_of_rank(layer, 1) * (precision.compute + precision.gradient) for layer in layers)
        for rank in stage.ranks:
            assert whole[rank] == others[rank]
            assert parts[rank] == others[rank] + gathered


def test_gathered_layers_are_transient():
    made = colocated()
    sharded, whole = (memory(replace(made, units=(replace(made.units[0], zero=zero),))) for zero in (3, 0))
    assert (sharded["parameters"] <= whole["parameters"] / 6).all()
    assert (sharded["transient"][:4] > whole["transient"][:4]).all()
