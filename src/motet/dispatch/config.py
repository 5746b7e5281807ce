"""`[balance]` of a recipe: which phases are balanced, in which way, at what cost, and at what speed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from motet.balance import ASSUMED_SPEEDS, METHODS, Cost, Link, Method, Packed, Padded, Speed
from motet.core.errors import UserError
from motet.core.limits import Latency, Rate
from motet.core.workload import BACKBONE


class PackedCostConfig(BaseModel):
    """Cost of an item of length l in a phase that packs: linear * l + quadratic * l**2, in any integer unit.

    Taken with `cost = "length"` alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    linear: int = Field(default=1, ge=0, le=10**6)
    quadratic: int = Field(default=0, ge=0, le=10**6)


class SpeedConfig(BaseModel):
    """`[balance.speed]`: what a rank computes and sends in a second, from which the way of balancing is predicted.

    Constants and no measurements, so that a run can be repeated and all ranks decide alike. What is not given is
    assumed by the kind of device, until it has been measured: what training reaches on a current data-centre GPU, with
    four fifths of a network card of 200 Gbit/s for each; or a CPU core and a loopback. A link between nodes is never
    assumed to be faster than the one inside. What counts is the ratio between computing and exchanging.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    device_tflops: Rate | None = Field(
        None, description="10^12 operations a second of a rank, as training reaches them; cuda 400, cpu 0.04"
    )
    link_gbytes_per_s: Rate | None = Field(
        None, description="10^9 bytes a second that a rank sends in its node; cuda 40, cpu 1"
    )
    link_latency_us: Latency | None = Field(
        None, description="microseconds of an exchange of nothing; cuda 50, cpu 300"
    )
    inter_node_gbytes_per_s: Rate | None = Field(
        None, description="10^9 bytes a second that a rank sends to other nodes; cuda 20, cpu 1"
    )
    inter_node_latency_us: Latency | None = Field(
        None, description="microseconds that an exchange between nodes takes of nothing; cuda 50, cpu 300"
    )

    def resolved(self, device_type: str) -> Speed:
        """With the assumption for a type of device, "cuda" or any other, in place of what is not given."""
        assumed = ASSUMED_SPEEDS["cuda" if device_type == "cuda" else "cpu"]
        flops_per_s = assumed.flops_per_s if self.device_tflops is None else self.device_tflops * 1e12
        return Speed(flops_per_s, *self.links(assumed.link, assumed.inter_node))

    def links(self, link: Link, inter_node: Link) -> tuple[Link, Link]:
        """What is given of the links; the rest as they are otherwise, but that none between nodes is the faster."""
        inside = _link(self.link_gbytes_per_s, self.link_latency_us, link)
        return inside, _link(
            self.inter_node_gbytes_per_s, self.inter_node_latency_us, inter_node.no_faster_than(inside)
        )


def _link(gbytes_per_s: float | None, latency_us: float | None, otherwise: Link) -> Link:
    return Link(
        otherwise.bytes_per_s if gbytes_per_s is None else gbytes_per_s * 1e9,
        otherwise.latency_s if latency_us is None else latency_us * 1e-6,
    )


class BalanceConfig(BaseModel):
    """Which phases are balanced and in which way, how items reach their ranks, and what an item costs.

    phases: "off", "backbone", "all", or the names of the phases that are balanced.
    method: how the phases are balanced together, if all are. "joint" places whole examples, so that no encoder output
            crosses ranks; "per_phase" places the items of each phase by themselves; "auto" predicts for each microbatch
            which is faster, or whether some encoders alone should be placed by themselves (`motet.balance.choose`).
    mode:   "index" (lengths are known before loading), "exchange" (items are moved after loading), "auto" (index where
            the data has one).
    cost:   what items are weighed by. "flops": the operations that the model's own layers do on them, forward and
            backward as it trains. "length": their lengths, or as `costs` say. "profile": the times that `motet profile`
            measured of the model, fitted linear + quadratic per phase; the ways are compared by them, too.
    profile: the file that it has written; by default profile.json in run.dir.
    costs:  per phase, integer coefficients of lengths; of phases that are left out, an item costs its length.
    speed:  what the prediction takes for the speed of devices and links.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    phases: Literal["off", "backbone", "all"] | tuple[str, ...] = "all"
    method: Literal["auto", "joint", "per_phase"] = "auto"
    mode: Literal["auto", "index", "exchange"] = "auto"
    cost: Literal["flops", "length", "profile"] = "flops"
    profile: Path | None = None
    costs: dict[str, PackedCostConfig] = Field(default_factory=dict)
    speed: SpeedConfig = SpeedConfig()

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
        """Those that a microbatch's is chosen from."""
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
            if self.speed.model_fields_set:
                raise UserError(
                    "balance.speed is what the ways to balance all phases are compared by: it has no effect with "
                    f"balance.phases = {given}; remove it."
                )
        return frozenset(phases)

    def phase_costs(self, kinds: Mapping[str, str]) -> dict[str, Cost]:
        """How the items of a rank make up its load, by phase: of their lengths where cost is "length".

        kinds: encoder name -> "packed" or "padded"; the backbone is always packed.

        Raises UserError for coefficients of an unknown phase, or of a padded one, which costs count times longest.
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
