"""`[balance]` of a recipe: which phases are balanced, how, at what cost, and at what assumed speed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from motet.balance import METHODS, Cost, LengthWork, Method, Packed
from motet.balance.costs import cost_of
from motet.core.errors import UserError
from motet.core.exchange import Communicator
from motet.core.plan import Policy
from motet.core.workload import BACKBONE
from motet.dispatch.speed import SpeedConfig

StatedPolicy = Literal["auto", Policy]
"""A policy as a recipe states it; "auto" is the one by which the module is computed."""


class LengthCostConfig(BaseModel):
    """Cost of an item of length l: linear * l + quadratic * l**2, in any integer unit; segments of an item add up.

    It has an effect only with `cost = "length"`.

    linear, quadratic: the factors of the length, and of its square.

    Example:
        >>> config = BalanceConfig(cost="length", costs={"image": LengthCostConfig(linear=3, quadratic=1)})
        >>> config.length_costs(config.policies({"image": "packed"}))[1].coefficients
        {'image': Packed(linear=3, quadratic=1)}
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    linear: int = Field(default=1, ge=0, le=10**6)
    quadratic: int = Field(default=0, ge=0, le=10**6)


class BalanceConfig(BaseModel):
    """Which phases are balanced, by which method, how items reach their ranks, and what an item costs.

    phases:  "off", "backbone", "all", or the names of the phases to balance.
    method:  how the phases are balanced together, if all are balanced. "joint" assigns whole examples to ranks, so that
             no encoder output crosses ranks. "per_phase" assigns the items of each phase independently. "auto" predicts
             for each microbatch which method is fastest, a mix of both included (`motet.balance.choose`). "split" cuts
             items that are too long for a rank over several (sequences, images), and balances encoders as is faster.
    split:   whether "auto" may cut items, too, where that is predicted to be faster, exchange included, or where no
             rank could hold them whole.
    mode:    "index": lengths are known before loading. "exchange": items move after loading. "auto": "index" if the
             data has an index, else "exchange".
    communicator: how inputs (in exchange mode) and encoder outputs move between ranks. "all_to_all": each rank gets its
             part. "all_gather": each rank gets all and takes its part, as in an ablation of OrchMLLM.
    node_wise: whether items are placed so that few inputs and outputs leave their node. false: they are placed as if
             nothing were loaded yet and all ranks shared a node; predictions still know the nodes.
    transport: over what inputs move in exchange mode. "host": gloo, from host memory. "device": the links of the GPUs,
             by NCCL on a communicator of its own; see docs/balancing.md before use.
    defer:   "auto": an example may change its microbatch within its step, if that is predicted to be faster
             (`motet.balance.choose_step`). It takes lengths that all ranks know before loading, and all phases
             balanced; it is the default in index mode. "off": examples stay in the microbatch in which they come.
    cost:    what an item weighs. "flops": the operations of the model's own layers, forward and backward as trained.
             "length": its length, or the polynomial in `costs`. "profile": the times that `motet profile` measured,
             fitted linear + quadratic per phase; these times also compare the methods.
    profile: the file that `motet profile` wrote; default: profile.json in run.dir.
    costs:   per phase, integer coefficients of lengths; in every other phase an item costs its length.
    policy:  how the work of a rank's items adds up to its load (OrchMLLM section 5.1). "packed": it is summed up.
             "padded": each item counts as the largest. "padded_attention": the linear part is summed up, and in the
             quadratic part each item counts as the longest (appendix A); with `cost = "length"` alone. "auto": as the
             module computes. One word is for all encoders; a table names phases. Another policy than the module's own
             is an ablation (section 8.3, "all pad" and "all rmpad"): it changes where items are computed, not how.
    speed:   the speed of devices and links that the prediction assumes.

    Example:
        >>> BalanceConfig(method="joint").methods
        ('joint',)
        >>> sorted(BalanceConfig(phases=("image",)).balanced(["image", "audio"]))
        ['image']
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    phases: Literal["off", "backbone", "all"] | tuple[str, ...] = "all"
    method: Literal["auto", "joint", "per_phase", "split"] = "auto"
    split: Literal["auto", "off"] = "off"
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
    costs: dict[str, LengthCostConfig] = Field(default_factory=dict)
    policy: StatedPolicy | dict[str, StatedPolicy] = "auto"
    speed: SpeedConfig = SpeedConfig()

    @model_validator(mode="after")
    def _defers_what_it_knows(self) -> BalanceConfig:
        if self.defer == "auto" and self.phases in ("off", "backbone"):
            raise ValueError(
                f'defer = "auto" compares times of all phases, and phases = "{self.phases}" balances not all; set '
                'phases = "all", or remove defer'
            )
        return self

    @model_validator(mode="after")
    def _chooses_among_some(self) -> BalanceConfig:
        if self.method == "per_phase" and self.phases in ("off", "backbone"):
            raise ValueError(
                f'method = "per_phase" has no effect with phases = "{self.phases}", which balances no encoder; remove '
                "it"
            )
        return self

    @model_validator(mode="after")
    def _compares_by_speed(self) -> BalanceConfig:
        if self.speed.model_fields_set and self.methods in (("joint",), ("per_phase",)) and self.defer == "off":
            raise ValueError(
                f'speed only compares ways of balancing, and method = "{self.method}" without defer = "auto" leaves '
                "one; remove it"
            )
        return self

    @model_validator(mode="after")
    def _moves_what_it_arranges(self) -> BalanceConfig:
        if self.transport == "device" and (self.mode != "exchange" or self.phases == "off"):
            why = 'without mode = "exchange"' if self.mode != "exchange" else 'with phases = "off"'
            raise ValueError(
                f'transport = "device" is for inputs that move between ranks, and {why} none does; remove it'
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
    def _cuts_what_it_can(self) -> BalanceConfig:
        if self.split == "auto" and self.method != "auto":
            raise ValueError(
                f'split = "auto" is for method = "auto", which it lets cut, and method is "{self.method}"; remove split'
            )
        if self.cut_by and (why := self.why_whole()):
            raise ValueError(f"{self.cut_by} {why}")
        return self

    def why_whole(self) -> str:
        """Why no item can be cut over ranks as it is set, as "takes ..., and ..."; "" if items can."""
        if self.mode == "exchange":
            return (
                "takes examples that every rank can read, of lengths that are known before loading, and "
                'mode = "exchange" moves each to one rank; set mode = "index"'
            )
        if self.communicator == "all_gather":
            return 'sends each rank its rows alone; remove communicator = "all_gather"'
        if isinstance(self.policy, dict) and self.policy.get(BACKBONE, "auto") not in ("auto", "packed"):
            return f'cuts packed sequences; remove policy.backbone = "{self.policy[BACKBONE]}"'
        return ""

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

    @model_validator(mode="after")
    def _parts_that_are_known(self) -> BalanceConfig:
        stated = self.policy.values() if isinstance(self.policy, dict) else (self.policy,)
        if "padded_attention" in stated and self.cost != "length":
            raise ValueError(
                'policy "padded_attention" takes a linear and a quadratic part of lengths, and with '
                f'cost = "{self.cost}" an item has one figure; set cost = "length", or another policy'
            )
        return self

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods from which one is chosen for each microbatch."""
        if self.method != "auto":
            return (self.method,)
        return (*METHODS, "split") if self.cut_by else METHODS

    @property
    def cut_by(self) -> str:
        """The setting by which items may be cut over ranks; "" if they may not."""
        return 'method = "split"' if self.method == "split" else 'split = "auto"' if self.split == "auto" else ""

    def balanced(self, encoders: Iterable[str]) -> frozenset[str]:
        """The names of the phases to balance.

        Raises UserError for a name that is no phase of the model, for options that need all phases balanced, and for a
        policy of a phase that is not balanced.
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
            if self.cut_by:
                raise UserError(
                    f'balance.{self.cut_by} compares times of all phases: balance.phases must be "all", not {given}.'
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
        self._check_policy(phases, known)
        return frozenset(phases)

    def _check_policy(self, balanced: Iterable[str], known: Sequence[str]) -> None:
        """Raise UserError for a policy that has no effect."""
        if self.policy == "auto":
            return
        stated = self.policy if isinstance(self.policy, dict) else [name for name in known[1:] if name in balanced]
        if not stated:
            raise UserError(
                f"balance.policy = {json.dumps(self.policy)} is of encoders, and none is balanced; remove it."
            )
        for name in stated:
            if name in known and name not in balanced:
                raise UserError(f"balance.policy: phase {name!r} is not balanced, so it has no policy; remove it.")

    def policies(self, own: Mapping[str, Policy]) -> dict[str, Policy]:
        """The policy of each phase, the backbone first.

        own: encoder name -> the policy by which it is computed; the backbone is computed packed.
        Raises UserError for a phase that the model does not have.
        """
        own = {BACKBONE: "packed", **own}
        if isinstance(self.policy, dict):
            stated = self.policy
        else:
            stated = dict.fromkeys([name for name in own if name != BACKBONE], self.policy)
        for name in stated:
            if name not in own:
                raise UserError(f"balance.policy: there is no phase {name!r}; the model has {', '.join(own)}.")
        return {name: kind if (given := stated.get(name, "auto")) == "auto" else given for name, kind in own.items()}

    def length_costs(self, policies: Mapping[str, Policy]) -> tuple[dict[str, Cost], LengthWork]:
        """With `cost = "length"`: how the work of a rank's items adds up, by phase, and the work of an item.

        policies: of all phases. Raises UserError for coefficients of an unknown phase, and for "padded_attention"
        without both of them.
        """
        for name in self.costs:
            if name not in policies:
                raise UserError(f"balance.costs: there is no phase {name!r}; the model has {', '.join(policies)}.")
        given = {name: Packed(config.linear, config.quadratic) for name, config in self.costs.items()}
        costs: dict[str, Cost] = {}
        for name, policy in policies.items():
            if policy == "padded_attention" and not (name in given and given[name].linear and given[name].quadratic):
                raise UserError(
                    f'balance.policy: "padded_attention" of {name!r} takes both coefficients, at least 1 each; set '
                    f"balance.costs.{name} = {{ linear = ..., quadratic = ... }}."
                )
            costs[name] = cost_of(policy, given.get(name))
        summed = {name: cost for name, cost in given.items() if policies[name] != "padded_attention"}
        return costs, LengthWork(coefficients=summed)
