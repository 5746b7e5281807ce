"""`[balance]` of a recipe: which phases are balanced, how, at what cost, and at what assumed speed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from motet.balance import METHODS, Cost, Method, Packed, Padded
from motet.core.errors import UserError
from motet.core.exchange import Communicator
from motet.core.workload import BACKBONE
from motet.dispatch.speed import SpeedConfig


class PackedCostConfig(BaseModel):
    """Cost of an item of length l in a packed phase: linear * l + quadratic * l**2, in any integer unit.

    It has an effect only with `cost = "length"`.

    Example:
        >>> config = BalanceConfig(cost="length", costs={"image": PackedCostConfig(linear=3, quadratic=1)})
        >>> config.phase_costs({"image": "packed"})["image"]
        Packed(linear=3, quadratic=1)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    linear: int = Field(default=1, ge=0, le=10**6)
    quadratic: int = Field(default=0, ge=0, le=10**6)


class BalanceConfig(BaseModel):
    """Which phases are balanced, by which method, how items reach their ranks, and what an item costs.

    phases:  "off", "backbone", "all", or the names of the phases to balance.
    method:  how the phases are balanced together, if all are balanced. "joint" assigns whole examples to ranks, so that
             no encoder output crosses ranks. "per_phase" assigns the items of each phase independently. "auto" predicts
             for each microbatch which method is fastest, a mix of both included (`motet.balance.choose`).
    mode:    "index": lengths are known before loading. "exchange": items move after loading. "auto": "index" if the
             data has an index, else "exchange".
    communicator: how inputs (in exchange mode) and encoder outputs move between ranks. "all_to_all": each rank gets its
             part. "all_gather": each rank gets all and takes its part, as in an ablation of OrchMLLM.
    node_wise: whether items are placed so that few inputs and outputs leave their node. false: they are placed as if
             nothing were loaded yet and all ranks shared a node; predictions still know the nodes.
    transport: over what inputs move in exchange mode. "host": gloo, from host memory. "device": the links of the GPUs,
             by NCCL on a communicator of its own; see docs/balancing.md before use.
    defer:   "auto": an example may change its microbatch within its step, if that is predicted to be faster
             (`motet.balance.choose_step`). It takes lengths that are known before loading, and all phases balanced; it
             is the default there. "off": examples stay in the microbatch in which they come.
    cost:    what an item weighs. "flops": the operations of the model's own layers, forward and backward as trained.
             "length": its length, or the polynomial in `costs`. "profile": the times that `motet profile` measured,
             fitted linear + quadratic per phase; these times also compare the methods.
    profile: the file that `motet profile` wrote; default: profile.json in run.dir.
    costs:   per phase, integer coefficients of lengths; in every other phase an item costs its length.
    speed:   the speed of devices and links that the prediction assumes.

    Example:
        >>> BalanceConfig(method="joint").methods
        ('joint',)
        >>> sorted(BalanceConfig(phases=("image",)).balanced(["image", "audio"]))
        ['image']
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    phases: Literal["off", "backbone", "all"] | tuple[str, ...] = "all"
    method: Literal["auto", "joint", "per_phase"] = "auto"
    mode: Literal["auto", "index", "exchange"] = "auto"
    communicator: Communicator = "all_to_all"
    node_wise: bool = True
    transport: Literal["host", "device"] = "host"
    defer: Literal["auto", "off"] = Field(
        default_factory=lambda given: (
            "off" if given.get("mode") == "exchange" or given.get("phases") != "all" else "auto"
        )
    )
    cost: Literal["flops", "length", "profile"] = "flops"
    profile: Path | None = None
    costs: dict[str, PackedCostConfig] = Field(default_factory=dict)
    speed: SpeedConfig = SpeedConfig()

    @model_validator(mode="after")
    def _defers_what_it_knows(self) -> BalanceConfig:
        if self.defer == "auto" and self.mode == "exchange":
            raise ValueError(
                'defer = "auto" takes lengths that are known before loading, and with mode = "exchange" they are not; '
                'set mode = "index", or remove defer'
            )
        if self.defer == "auto" and self.phases in ("off", "backbone"):
            raise ValueError(
                f'defer = "auto" compares times of all phases, and phases = "{self.phases}" balances not all; set '
                'phases = "all", or remove defer'
            )
        return self

    @model_validator(mode="after")
    def _moves_what_it_arranges(self) -> BalanceConfig:
        if self.transport == "device" and self.mode != "exchange":
            raise ValueError(
                'transport = "device" is for inputs that move between ranks, and without mode = "exchange" none does; '
                "remove it"
            )
        has_no_inputs, has_no_outputs = self.mode != "exchange", self.phases == "backbone" or self.method == "joint"
        if self.phases == "off" or (has_no_inputs and has_no_outputs):
            for name, is_default in (
                ("communicator", self.communicator == "all_to_all"),
                ("node_wise", self.node_wise),
            ):
                if not is_default:
                    raise ValueError(
                        f"{name} is for what moves between ranks, and nothing does: "
                        f'mode = "{self.mode}", phases = {json.dumps(self.phases)}, method = "{self.method}"; remove it'
                    )
        return self

    @model_validator(mode="after")
    def _one_source_of_costs(self) -> BalanceConfig:
        if self.costs and self.cost != "length":
            raise ValueError(
                f'costs are coefficients of lengths, and with cost = "{self.cost}" items are not weighed by their '
                'lengths; set cost = "length", or remove costs'
            )
        if self.cost == "profile":
            if self.phases == "off":
                raise ValueError('cost = "profile" has no effect with phases = "off"; remove it')
            if self.speed.device_tflops is not None:
                raise ValueError('speed.device_tflops has no effect with cost = "profile", which has measured times')
        elif self.profile is not None:
            raise ValueError('profile has no effect without cost = "profile"')
        return self

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods from which one is chosen for each microbatch."""
        return METHODS if self.method == "auto" else (self.method,)

    def balanced(self, encoders: Iterable[str]) -> frozenset[str]:
        """The names of the phases to balance.

        Raises UserError for a name that is no phase of the model, and for options that need all phases balanced.
        """
        known = [BACKBONE, *encoders]
        phases = {"off": (), "backbone": (BACKBONE,), "all": known}.get(self.phases, self.phases)
        for name in phases:
            if name not in known:
                raise UserError(f"balance.phases: there is no phase {name!r}; the model has {', '.join(known)}.")
        if set(phases) != set(known):
            given = f'"{self.phases}"' if isinstance(self.phases, str) else json.dumps(self.phases)
            if self.method == "joint":
                raise UserError(
                    'balance.method = "joint" places whole examples so that all phases are balanced at once: '
                    f'balance.phases must be "all", not {given}.'
                )
            if self.defer == "auto":
                raise UserError(
                    'balance.defer = "auto" compares times of all phases: it has no effect with '
                    f"balance.phases = {given}; remove it."
                )
            if self.speed.model_fields_set:
                raise UserError(
                    "balance.speed only compares the methods of balancing all phases: it has no effect with "
                    f"balance.phases = {given}; remove it."
                )
        return frozenset(phases)

    def phase_costs(self, kinds: Mapping[str, str]) -> dict[str, Cost]:
        """Per phase, how the work of the items of a rank adds up to the rank's load.

        kinds: encoder name -> "packed" or "padded"; the backbone is always packed.

        Raises UserError for coefficients of an unknown phase, or of a padded one (its cost is count * longest).
        """
        kinds = {BACKBONE: "packed", **kinds}
        for name in self.costs:
            if name not in kinds:
                raise UserError(f"balance.costs: there is no phase {name!r}; the model has {', '.join(kinds)}.")
            if kinds[name] == "padded":
                raise UserError(
                    f"balance.costs.{name}: phase {name!r} is computed with padding, so it costs its number of items "
                    "times the longest; remove the coefficients."
                )
        costs: dict[str, Cost] = {}
        for name, kind in kinds.items():
            given = self.costs.get(name, PackedCostConfig())
            costs[name] = Padded() if kind == "padded" else Packed(linear=given.linear, quadratic=given.quadratic)
        return costs
