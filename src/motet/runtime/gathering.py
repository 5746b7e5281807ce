"""Rows of encoders in bubbles come together behind their last block, where ranks have dealt out their items."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch.distributed as dist
from torch import Tensor

from motet.dispatch.exchange import all_gathered
from motet.dispatch.gathered_rows import GatheredRows
from motet.runtime.place import Place
from motet.schedule.coordinates import replica_of


class Gathering:
    """What one rank gathers in a step: of each stage in bubbles that sends to the backbone, the rows of all ranks.

    groups:  unit -> the ranks on which its rows come together, of those whose rows do.
    rows_of: (module, replica, number of the rank among these, microbatch) -> what it gathers. Of replicas, each of the
             backbone's context-parallel ranks counts.
    like:    a tensor of the type and on the device of what goes to other stages.
    sent:    gets the bytes that this rank sends.
    """

    def __init__(
        self,
        place: Place,
        groups: Mapping[str, dist.ProcessGroup],
        rows_of: Callable[[str, int, int, int], GatheredRows],
        like: Tensor,
        sent: list[float],
    ) -> None:
        self._place, self._groups, self._rows_of, self._like, self._sent = place, groups, rows_of, like, sent
        self._stages = {
            number: stage
            for number, stage in place.stages.items()
            if stage.unit.name in groups and stage.index == len(stage.unit.stages) - 1
        }
        self._gathered = cache(self._rows)  # Backward asks for what forward has made.

    def outputs(self, number: int, microbatch: int, outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What a stage sends: of each module [num_rows, width], from what this rank has made of it. A collective."""
        if number not in self._stages:
            return outputs
        unit, model, gathered = self._stages[number].unit, self._place.program.layout.plan.model, {}
        for name in unit.modules:
            rows = self._gathered(number, name, microbatch)
            if not rows.share_rows:
                continue
            own, group = outputs.get(name), self._groups[unit.name]
            if own is None:
                own = self._like.new_empty(0, model.moved(name)[0].output_width)
            own = own.detach().to(self._like.dtype)
            if len(own) != len(rows.own):
                raise RuntimeError(f"{name!r} has {len(own)} rows on this rank; lengths say {len(rows.own)}")
            gathered[name] = all_gathered(own, rows.share_rows, group).index_select(0, rows.index)
            self._sent.append(float(rows.share_rows * own.shape[1] * own.itemsize * (group.size() - 1)))
        return gathered

    def gradients(self, number: int, microbatch: int, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients of what this rank has made, from those of what the stage sends."""
        if number not in self._stages:
            return gradients
        return {name: rows[self._gathered(number, name, microbatch).own] for name, rows in gradients.items()}

    def _rows(self, number: int, name: str, microbatch: int) -> GatheredRows:
        stage, place = self._stages[number], self._place
        layout = place.program.layout
        c, t = divmod(place.index, layout.backbone.tp)
        replica = replica_of(layout, stage, place.island) * layout.backbone.cp + c
        return self._rows_of(name, replica, t // stage.unit.tp, microbatch).to(self._like.device)
