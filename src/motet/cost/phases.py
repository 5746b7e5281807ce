"""The cost of an item of a phase by a profile: whole picoseconds a token and a token squared.

The seconds of a module on a measured batch are the sum over its layers of the passes that training needs: frozen
weights have no gradient, nor has an input that nothing before it needs (Cornstarch section 4.2). A fit to these seconds
is the phase's cost (OrchMLLM equation 2). It is quantised, so that all ranks balance alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.errors import UserError
from motet.core.limits import INT64_MAX
from motet.core.spec import Layer, ModelSpec, Module
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.cost.fit import Curve, RelativeError, fit_curve, relative_error
from motet.cost.model import LayerSeconds, backward_seconds
from motet.cost.profile import LayerTimes, ModuleTimes, Points, Profile, in_words

PS_PER_NS = 1000


@dataclass(frozen=True)
class PhaseTimes:
    """Picoseconds of a rank for forward and backward of one phase.

    constant_ps:  for each microbatch.
    linear_ps:    for each length of an item; in a padded phase, the length of the longest item.
    quadratic_ps: for each length^2 of an item, or of each of its segments; in a padded phase, that of the longest item.
    target_ps:    for each token on which loss is taken.
    media_row_ps: for each length of a sequence with images that some layers attend to, and
    media_ps:     for each of its images.
    held_out:     the error of the fit on batches that it has not seen.
    """

    constant_ps: int
    linear_ps: int
    quadratic_ps: int
    target_ps: int
    held_out: RelativeError
    media_row_ps: int = 0
    media_ps: int = 0

    def of_items(self, items: ItemLengths, num_targets: Int64Array) -> Int64Array:
        """Picoseconds that each item adds, int64 [num_items], without the constant.

        num_targets: int64 [num_items]. Raises UserError if an item could take 2^63 picoseconds or more.
        """
        longest, most_targets = int(items.length.max(initial=0)), int(num_targets.max(initial=0))
        num_media = np.zeros_like(items.length) if items.num_media is None else items.num_media
        a_row_ps = self.linear_ps + self.media_row_ps + longest * self.quadratic_ps
        most_media_ps = int(num_media.max(initial=0)) * self.media_ps
        if longest * a_row_ps + most_targets * self.target_ps + most_media_ps > INT64_MAX:
            raise UserError(f"By the profile, an item of length {longest:,} takes more than 100 days.")
        of_rows = items.summed(lambda lengths: lengths * (self.linear_ps + self.quadratic_ps * lengths))
        of_media = items.length * (num_media > 0) * self.media_row_ps + num_media * self.media_ps
        return of_rows + self.target_ps * num_targets + of_media


@dataclass(frozen=True)
class Picoseconds:
    """`balance.ItemWork`: the picoseconds that each item adds to a microbatch. phases: for every module."""

    phases: Mapping[str, PhaseTimes]

    def __call__(self, lengths: BatchLengths) -> dict[str, Int64Array]:
        work = {}
        for name, times in self.phases.items():
            items = lengths.of(name)
            num_targets = lengths.num_targets if name == BACKBONE else np.zeros_like(items.length)
            work[name] = times.of_items(items, num_targets)
        return work

    def unit(self, phase: str) -> str:
        """The name of the unit."""
        return "ps"


def phase_times(profile: Profile, model: ModelSpec, name: str, num_recomputed: int = 0) -> PhaseTimes:
    """The times of the module `name`. num_recomputed: of its transformer blocks, so many run forward again.

    Raises UserError if the profile lacks the module or one of its kinds of layer, and if it is of before profiles said
    which rows attention reaches, and layers of one kind reach different ones.
    """
    module, times = model.module(name), profile.module(name)
    if times is None:
        raise UserError(
            f"The profile of {profile.recipe} has no module {name!r}, only "
            f"{', '.join(repr(measured.name) for measured in profile.modules)}: profile the recipe that is trained."
        )
    seconds = _Seconds(profile, model, module, times, _of_first_blocks(module, num_recomputed))
    body = seconds.fit(times)
    targets = [seconds.rows_fit(layer, number) for number, layer in enumerate(module.layers) if layer.targets_only]
    media = [
        (layer.item_rows, seconds.rows_fit(layer, number))
        for number, layer in enumerate(module.layers)
        if layer.of_media
    ]
    predicted = body.seconds(*times.amounts(held_out=True, padded=module.padded))
    return PhaseTimes(
        round(body.constant_ns * PS_PER_NS),
        round(body.linear_ns * PS_PER_NS),
        round(body.quadratic_ns * PS_PER_NS),
        round(sum(line.linear_ns for line in targets) * PS_PER_NS),
        relative_error(predicted, seconds.total(lambda layer: layer.held_out, len(times.held_out))),
        round(sum(line.linear_ns for item_rows, line in media if not item_rows) * PS_PER_NS),
        round(sum(item_rows * line.linear_ns for item_rows, line in media) * PS_PER_NS),
    )


def _of_first_blocks(module: Module, count: int) -> frozenset[int]:
    """Indexes of the layers of the first `count` transformer blocks."""
    blocks = (index for block in module.blocks[:count] for index in block)
    return frozenset(index for index in blocks if module.layers[index].in_block)


@dataclass(frozen=True)
class _Seconds:
    """Seconds of one module in training, from its profiled layers."""

    profile: Profile
    model: ModelSpec
    module: Module
    times: ModuleTimes
    recomputed: frozenset[int]

    def fit(self, times: ModuleTimes) -> Curve:
        """The fit to the batches of the grid, without the layers of `rows_fit`."""
        seconds = self.total(lambda layer: layer.grid, len(times.grid))
        return fit_curve(seconds, *times.amounts(padded=self.module.padded))

    def rows_fit(self, layer: Layer, number: int) -> Curve:
        """The fit of a layer to its number of rows: of one that sees targets alone, or that images of a sequence have.

        number: the layer's index.
        """
        points = self._measured(layer).grid
        return fit_curve(self._of_layer(layer, number, points), points.rows)

    def total(self, points: Callable[[LayerTimes], Points], num_batches: int) -> Float64Array:
        """Seconds of all layers but those of `rows_fit`, float64 [num_batches]."""
        total = np.zeros(num_batches)
        for number, layer in enumerate(self.module.layers):
            if not layer.targets_only and not layer.of_media:
                total += self._of_layer(layer, number, points(self._measured(layer)))
        return total

    def _of_layer(self, layer: Layer, number: int, points: Points) -> Float64Array:
        """Seconds of one layer at its points, over the passes that it has."""
        measured = LayerSeconds(*(np.array(each) for each in (points.forward_s, points.input_s, points.weight_s)))
        needs_input = self.model.input_gradients[self.module.name][number]
        return measured.forward_s + backward_seconds(measured, layer, needs_input, number in self.recomputed)

    def _measured(self, layer: Layer) -> LayerTimes:
        times = self.times.of_layer(layer)
        if times is None:
            raise UserError(
                f"The profile of {self.profile.recipe} is of another model: module {self.module.name!r} has a layer "
                f"{in_words(layer)}, of which it has no times; profile the recipe that is trained."
            )
        if times.reach is None and (layer.kind, layer.weights) in self._of_several_reaches:
            raise UserError(
                f"The profile of {self.profile.recipe} has one layer for all {layer.kind!r} of {layer.weights} weights "
                f"in module {self.module.name!r}, whose attention reaches different rows (windows, or none): make it "
                "anew with `motet profile`, which times each."
            )
        return times

    @cached_property
    def _of_several_reaches(self) -> frozenset[tuple[str, int]]:
        """Kind and weights of layers whose attention is not of one reach."""
        reaches: dict[tuple[str, int], set[tuple[bool, int, bool]]] = {}
        for layer in self.module.layers:
            if layer.attention is not None:
                reaches.setdefault((layer.kind, layer.weights), set()).add(layer.attention.reach)
        return frozenset(key for key, found in reaches.items() if len(found) > 1)
