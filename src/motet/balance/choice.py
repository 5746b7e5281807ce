"""How the phases of a microbatch are balanced together: predict the seconds of each method and take the fastest.

joint      one assignment of whole examples for all phases. Encoder outputs stay on the rank that runs their sequence.
per_phase  each phase by itself (OrchMLLM, arXiv:2503.23830, sections 5 and 6). Each phase is balanced best, but encoder
           outputs cross ranks, and their gradients return: the excess of packed items, most of the padded ones.
mixed      joint, but encoders whose own assignment gains more than its exchange takes are balanced by themselves. These
           are mostly padded ones: an assignment of whole examples cannot balance count * longest.
split      items that are too long for a rank cut over several ranks, all others whole (cutting.py): sequences, and
           items of encoders that can be. Each encoder is as in joint, as in per_phase, or balanced with items cut,
           whichever is faster. It is considered only if `methods` names it.

Predicted seconds = (sum over phases of the busiest rank's seconds) + (sum over encoders of the exchange's seconds)
                    + (seconds of exchanging keys and values of cut items, layer by layer).

- Phases add up because ranks wait for each other in each of them (sharded modules gather weights layer by layer). With
  whole copies of the model they wait in exchanges alone (`Phase.waits`): phases between which nothing is exchanged take
  what the rank does that is busiest in all of them.
- An exchange takes as long as its slowest rank, for bytes inside its node and between nodes (`core/exchange.py`).
- Times are compared in whole nanoseconds, so that all ranks choose the same.
- What fits the ranks' memory comes before what is faster, where it is known what items take (item_bytes.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Literal, get_args

from numpy.typing import ArrayLike

from motet.balance.backend import Backend
from motet.balance.checks import checked_num_ranks, checked_ranks
from motet.balance.costs import Packed
from motet.balance.cutting import CutPhase, cut_phase, cut_words, deliveries
from motet.balance.fragments import Split
from motet.balance.item_bytes import lacking_bytes
from motet.balance.joint import assign_jointly
from motet.balance.phases import (
    Held,
    Phase,
    assign_apart,
    assign_backbone,
    check_phases,
    computing_ns,
    follow,
    joint_costs,
    kept_within,
    scored_phase,
)
from motet.balance.placement import assign
from motet.core.arrays import Int32Array
from motet.core.assignment import Assignment
from motet.core.cluster import Link
from motet.core.errors import ArgumentError
from motet.core.exchange import NS_PER_S, Network, hop_of_all_gather, moved, sent_in_all_gather
from motet.core.words import shown_seconds

Method = Literal["joint", "mixed", "per_phase", "split"]
METHODS: tuple[Method, ...] = ("joint", "mixed", "per_phase")
"""The methods that leave items whole. The one that moves fewer bytes comes first, and wins a tie."""
UNBALANCED = "unbalanced"
_MIN_STARTED = 1024
"""Of fewer examples "joint" is always searched: it takes a millisecond, and bounds are rough."""


@dataclass(frozen=True, eq=False)
class Choice:
    """The method that is predicted to be the fastest, and its assignments.

    assignments: one for each phase, in their order. Where an encoder's items follow their examples, they are in the
                 order of these, so that outputs need no sorting. With "split", a cut item is on the rank of its
                 largest fragment, and its phase's loads are those of fragments.
    fragments:   with "split", whole sequences and fragments of others, and the rank of each; None: no sequence is cut.
    before:      the assignments without balancing, one for each phase; (), if `home` was not given.
    cut_items:   encoder -> as `fragments`, of its items, where some are cut.
    predicted_s: predicted seconds by method; with "unbalanced", if `home` was given. Where "joint" cannot be the
                 fastest, those of the placement that its search would begin with.
    exchange_s:  the part of predicted_s that exchanges take, by method.
    moved_bytes: bytes that cross ranks in them, in both directions.
    why:         one sentence with the figures.
    lacking_bytes: what the fullest rank lacks of the memory that it takes, where no method fits; 0 where it fits, and
                 where memory is not known.
    fits_whole:  whether a method of whole items fits, if any was considered.

    Example:
        >>> import numpy as np
        >>> backbone = Phase("backbone", np.array([9, 5, 4]), Packed(), np.arange(3), seconds_per_cost=0.001)
        >>> choice = choose([backbone], num_ranks=2, link=Link(1e9, 0.0), home=[0, 0, 1])
        >>> choice.assignments[0].ranks.tolist()
        [0, 1, 1]
        >>> choice.why
        'joint: 9 ms predicted (per_phase 9 ms; unbalanced 14 ms).'
    """

    method: Method
    assignments: tuple[Assignment, ...]
    fragments: Split | None
    predicted_s: dict[str, float]
    exchange_s: dict[str, float]
    moved_bytes: int
    why: str
    before: tuple[Assignment, ...] = ()
    cut_items: Mapping[str, Split] = field(default_factory=dict)
    lacking_bytes: int = 0
    fits_whole: bool = True

    @property
    def predicted_ns(self) -> int:
        """Predicted nanoseconds of the chosen method: what methods are compared by."""
        return round(self.predicted_s[self.method] * NS_PER_S)


@dataclass(frozen=True, eq=False)
class _Option:
    """The assignments of one method, and their predicted time. words: on what is cut."""

    assignments: tuple[Assignment, ...]
    compute_ns: int
    exchange_ns: int
    moved_bytes: int
    fragments: Split | None = None
    words: str = ""
    cut_items: Mapping[str, Split] = field(default_factory=dict)
    lacking_bytes: int = 0

    @property
    def total_ns(self) -> int:
        """Predicted nanoseconds of computing and exchanging."""
        return self.compute_ns + self.exchange_ns

    @property
    def key(self) -> tuple[int, int, int]:
        """Options are compared by it: what fits first; then time, then bytes that move."""
        return self.lacking_bytes, self.total_ns, self.moved_bytes


def choose(
    phases: Sequence[Phase],
    num_ranks: int,
    link: Link | Network,
    *,
    methods: Sequence[Method] = METHODS,
    home: ArrayLike | None = None,
    input_bytes: ArrayLike | None = None,
    room_bytes: int | None = None,
    backend: Backend = "native",
) -> Choice:
    """Choose the fastest of `methods` for one microbatch.

    phases: the backbone first; its items are the examples.
    link: the link of exchanges; a Link alone means that all ranks share a node.
    home: int [num_examples], the rank of each example without balancing. It adds "unbalanced" to the predictions.
    input_bytes: int [num_examples], >= 0, the size of what the home rank of an example has loaded; None: every rank
        can load any example. With it, little leaves its node, at the price of 0.1 % of the balance (joint: 1.6 %).
    room_bytes: what items may take of a rank's memory (`Phase.bytes`); None: it is not known. A method that fits comes
        before a faster one that does not, and "split" also cuts what no rank can hold whole.

    A long item does not keep the microbatch from being balanced: other items are balanced beside it. A tie goes to the
    method that moves fewer bytes, then to the earlier of `methods`. The result is a pure function of the arguments.
    Costs up to three `assign` for each phase, and two `assign_jointly`, whose search is left out where it cannot win.
    Raises ArgumentError for wrong arguments.
    """
    num_ranks = checked_num_ranks(num_ranks)
    _check(phases, methods)
    if input_bytes is not None and home is None:
        raise ArgumentError("input_bytes is given without home; it must go with home, the rank that holds them.")
    network = Network.of(link)
    held = None
    if home is not None and input_bytes is not None and network.node_wise:
        held = Held(home, input_bytes, network.ranks_per_node)
    # 1. Predict each method.
    options: dict[str, _Option] = {}
    alone = _Alone(num_ranks, backend)
    if "per_phase" in methods:
        backbone = assign_backbone(phases[0].lengths, phases[0].cost, num_ranks, held, backend)
        encoders = [_apart(phase, backbone, network, alone) for phase in phases[1:]]
        for phase, placed in zip(phases, [backbone, *encoders], strict=True):
            phase.learn_bound(placed)
        options["per_phase"] = _option(phases, network, [backbone, *encoders])
        options["per_phase"] = _sized(options["per_phase"], phases, room_bytes)
    if "joint" in methods and (start := _slow_start(phases, network, held, alone, options.get("per_phase"))):
        options["joint"] = start
    elif "joint" in methods:
        options["joint"] = _follow_all(phases, network, _joint_backbone(phases, num_ranks, held, backend), {})
        if "mixed" in methods and (mixed := _mixed(phases, network, options["joint"], held, alone)):
            options["mixed"] = mixed
    options = {name: _sized(option, phases, room_bytes) for name, option in options.items()}
    if "split" in methods and (cut := _split(phases, network, room_bytes, alone, is_only=len(methods) == 1)):
        options["split"] = cut
    # 2. Take the fastest.
    method = min((name for name in methods if name in options), key=lambda name: options[name].key)
    # 3. Predict the microbatch without balancing, for comparison.
    return _chosen(method, options | _unbalanced(phases, num_ranks, network, home))


def choose_given(
    phases: Sequence[Phase],
    ranks: Int32Array,
    num_ranks: int,
    link: Link | Network,
    *,
    home: ArrayLike | None = None,
    room_bytes: int | None = None,
) -> Choice:
    """The Choice of "joint" with the given rank of each example, int32 [num_examples]. Others: as in `choose`."""
    network = Network.of(link)
    option = _sized(_follow_all(phases, network, scored_phase(phases[0], ranks, num_ranks), {}), phases, room_bytes)
    return _chosen("joint", {"joint": option} | _unbalanced(phases, num_ranks, network, home))


def _unbalanced(
    phases: Sequence[Phase], num_ranks: int, network: Network, home: ArrayLike | None
) -> dict[str, _Option]:
    """The microbatch without balancing, if it is known where its examples are."""
    if home is None:
        return {}
    ranks = checked_ranks(home, "home", len(phases[0].lengths), num_ranks)
    return {UNBALANCED: _follow_all(phases, network, scored_phase(phases[0], ranks, num_ranks), {})}


def _chosen(method: Method, options: dict[str, _Option]) -> Choice:
    return Choice(
        method=method,
        assignments=options[method].assignments,
        fragments=options[method].fragments,
        cut_items=options[method].cut_items,
        predicted_s={name: option.total_ns / NS_PER_S for name, option in options.items()},
        exchange_s={name: option.exchange_ns / NS_PER_S for name, option in options.items()},
        moved_bytes=options[method].moved_bytes,
        why=_why(method, options),
        before=options[UNBALANCED].assignments if UNBALANCED in options else (),
        lacking_bytes=options[method].lacking_bytes,
        fits_whole=not all(option.lacking_bytes for name, option in options.items() if name in METHODS)
        or options.keys().isdisjoint(METHODS),
    )


def _sized(option: _Option, phases: Sequence[Phase], room_bytes: int | None) -> _Option:
    """The option with what it lacks of memory."""
    cuts = [option.fragments, *(option.cut_items.get(phase.name) for phase in phases[1:])]
    placed = zip([phase.bytes for phase in phases], option.assignments, cuts, strict=True)
    return replace(option, lacking_bytes=lacking_bytes(placed, option.assignments[0].num_ranks, room_bytes))


class _Alone:
    """Phases balanced by themselves, wherever their examples are: each once."""

    def __init__(self, num_ranks: int, backend: Backend) -> None:
        self.num_ranks, self.backend = num_ranks, backend
        self._known: dict[str, Assignment] = {}

    def of(self, phase: Phase) -> Assignment:
        """The placement of a phase."""
        if phase.name not in self._known:
            self._known[phase.name] = assign(phase.lengths, self.num_ranks, phase.cost, backend=self.backend)
        return self._known[phase.name]


def _slow_start(
    phases: Sequence[Phase], network: Network, held: Held | None, alone: _Alone, per_phase: _Option | None
) -> _Option | None:
    """The joint placement that a search would begin with, where neither "joint" nor "mixed" can be the fastest; else
    None.

    The search lowers loads, at most to their bounds, and knows nothing of padding. So "joint" is slower than another
    method that beats its start by more than that. Without padding none does, and this is not tried. "mixed" is left out
    where every encoder would be balanced by itself.
    """
    if per_phase is None or per_phase.lacking_bytes or held is not None or len(phases[0].lengths) < _MIN_STARTED:
        return None
    if all(isinstance(phase.cost, Packed) for phase in phases) or not all(phase.waits for phase in phases):
        return None
    costs, unit_s = joint_costs(phases)
    placed = assign_jointly(costs, alone.num_ranks, time_budget_s=0.0, backend=alone.backend)
    start = _follow_all(phases, network, scored_phase(phases[0], placed.ranks, alone.num_ranks), {})
    gain_ns = int((placed.loads.max(axis=0) - placed.bound).sum()) * unit_s * NS_PER_S
    if start.total_ns - gain_ns <= per_phase.total_ns:
        return None
    for phase, together, apart in zip(phases[1:], start.assignments[1:], per_phase.assignments[1:], strict=True):
        # Beside another backbone, other outputs move: up to twice as many, as the exchange is estimated here.
        exchange_ns, _ = _exchange(phase, apart, per_phase.assignments[0], network)
        if phase.compute_ns(apart) + 2 * exchange_ns >= phase.compute_ns(together):
            return None
    return start


def _mixed(
    phases: Sequence[Phase], network: Network, joint: _Option, held: Held | None, alone: _Alone
) -> _Option | None:
    """Joint, without the encoders that are faster by themselves; None if no encoder is, or if all are."""
    backbone = joint.assignments[0]
    faster = []
    for phase, together in zip(phases[1:], joint.assignments[1:], strict=True):
        apart = _apart(phase, backbone, network, alone)
        exchange_ns, _ = _exchange(phase, apart, backbone, network)
        if phase.compute_ns(apart) + exchange_ns < phase.compute_ns(together):
            faster.append(phase)
    remaining = [phase for phase in phases if phase not in faster]
    if not faster or len(remaining) == 1:
        return None
    # A joint assignment of fewer phases balances them better.
    backbone = _joint_backbone(remaining, alone.num_ranks, held, alone.backend)
    return _follow_all(
        phases, network, backbone, {phase.name: _apart(phase, backbone, network, alone) for phase in faster}
    )


def _apart(phase: Phase, backbone: Assignment, network: Network, alone: _Alone) -> Assignment:
    return assign_apart(
        phase.lengths,
        phase.cost,
        phase.owner,
        backbone,
        alone.backend,
        output_bytes=phase.output_bytes,
        ranks_per_node=network.kept_within_nodes,
        alone=partial(alone.of, phase),
    )


def _split(
    phases: Sequence[Phase], network: Network, room_bytes: int | None, alone: _Alone, *, is_only: bool
) -> _Option | None:
    """The fastest way to cut items; None if none is too long for a rank. is_only: then all of them stay whole."""
    num_ranks, backend = alone.num_ranks, alone.backend
    items = {
        phase.name: cut_phase(phase, num_ranks, network, room_bytes, backend)
        for phase in phases[1:]
        if phase.rows is not None
    }
    options = []
    for cut in cut_phase(phases[0], num_ranks, network, room_bytes, backend):
        placed = [cut]
        for phase in phases[1:]:
            whole = follow(phase, cut.placed), _apart(phase, cut.placed, network, alone)
            ways = [*(CutPhase(way, None, 0, 0) for way in whole), *items.get(phase.name, ())]
            exchanges = (
                _exchange(phase, way.placed, cut.placed, network, _taking_in(phases[0], cut.fragments), way.fragments)
                for way in ways
            )
            keys = [
                (
                    lacking_bytes([(phase.bytes, way.placed, way.fragments)], num_ranks, room_bytes),
                    phase.compute_ns(way.placed) + exchange_ns + way.keys_ns,
                )
                for way, (exchange_ns, _) in zip(ways, exchanges, strict=True)
            ]
            placed.append(ways[keys.index(min(keys))])
        if is_only or any(each.fragments is not None for each in placed):
            options.append(_sized(_cut_option(phases, network, placed), phases, room_bytes))
    return min(options, key=lambda option: option.key, default=None)


def _cut_option(phases: Sequence[Phase], network: Network, placed: Sequence[CutPhase]) -> _Option:
    """The prediction for phases of which some items are cut, an entry a phase."""
    named = {phase.name: each.fragments for phase, each in zip(phases, placed, strict=True) if each.fragments}
    option = _option(phases, network, [each.placed for each in placed], named)
    whats = ("sequence", *(f"{phase.name} item" for phase in phases[1:]))
    words = (
        cut_words(each.fragments, phase.rows, what) for each, phase, what in zip(placed, phases, whats, strict=True)
    )
    return replace(
        option,
        exchange_ns=option.exchange_ns + sum(each.keys_ns for each in placed),
        moved_bytes=option.moved_bytes + sum(each.keys_bytes for each in placed),
        fragments=named.pop(phases[0].name, None),
        cut_items=named,
        words="; ".join(filter(None, words)),
    )


def _joint_backbone(phases: Sequence[Phase], num_ranks: int, held: Held | None, backend: Backend) -> Assignment:
    """The backbone's phase of the joint assignment of `phases`, the backbone first."""
    costs = joint_costs(phases)[0]
    if held is None:
        ranks = assign_jointly(costs, num_ranks, backend=backend).ranks
    else:
        ranks = assign_jointly(
            costs,
            num_ranks,
            home=held.home,
            bytes=held.input_bytes,
            ranks_per_node=kept_within(held.ranks_per_node, num_ranks),
            backend=backend,
        ).ranks
    return scored_phase(phases[0], ranks, num_ranks)


def _follow_all(
    phases: Sequence[Phase], network: Network, backbone: Assignment, apart: dict[str, Assignment]
) -> _Option:
    """Encoders follow their examples, except those in `apart`."""
    encoders = [apart[phase.name] if phase.name in apart else follow(phase, backbone) for phase in phases[1:]]
    return _option(phases, network, [backbone, *encoders])


def _option(
    phases: Sequence[Phase],
    network: Network,
    assignments: Sequence[Assignment],
    cut: Mapping[str, Split] = MappingProxyType({}),
) -> _Option:
    """The prediction for these assignments, one for each phase. cut: phase -> fragments, where items are cut."""
    taking_in = _taking_in(phases[0], cut.get(phases[0].name))
    exchanges = [
        _exchange(phase, placed, assignments[0], network, taking_in, cut.get(phase.name))
        for phase, placed in zip(phases[1:], assignments[1:], strict=True)
    ]
    return _Option(
        tuple(assignments),
        computing_ns(
            phases,
            assignments,
            [
                phases[0].name in cut,
                *(phase.name in cut or size > 0 for phase, (_, size) in zip(phases[1:], exchanges)),
            ],
        ),
        sum(nanoseconds for nanoseconds, _ in exchanges),
        sum(moved_bytes for _, moved_bytes in exchanges),
    )


def _taking_in(backbone: Phase, fragments: Split | None) -> Split | None:
    """The fragments of sequences that take in rows of encoders; None: the ranks that have most of each sequence do."""
    return None if backbone.merged else fragments


def _exchange(
    phase: Phase,
    placed: Assignment,
    backbone: Assignment,
    network: Network,
    fragments: Split | None = None,
    cut: Split | None = None,
) -> tuple[int, int]:
    """The exchange of a phase's outputs and gradients: nanoseconds, and bytes that cross ranks.

    fragments: as of `_taking_in`. cut: of the phase's own items.
    """
    if phase.output_bytes is None:
        return 0, 0
    source, destination, output_bytes = deliveries(phase, placed, cut, backbone, fragments)
    moves = source != destination
    if not moves.any():
        return 0, 0
    node = network.nodes(placed.num_ranks)
    if network.communicator == "all_gather":
        # Outputs are gathered from where they are computed, and gradients from where the outputs were needed.
        holders = (source, destination)[: phase.num_exchanges]
        hops_s = sum(float(network.exchange_s(hop_of_all_gather(at, output_bytes, node))[0]) for at in holders)
        sent = sum(sent_in_all_gather(at, output_bytes, node)[0] for at in holders)
        return round((len(node) - 1) * hops_s * NS_PER_S), sent
    size_bytes = moved(source, destination, output_bytes, node)
    # Gradients return by the same route, so the same rank is the slowest.
    seconds = phase.num_exchanges * float(network.exchange_s(size_bytes)[0])
    return round(seconds * NS_PER_S), phase.num_exchanges * int(output_bytes[moves].sum())


def _why(method: Method, options: dict[str, _Option]) -> str:
    def exchange(option: _Option) -> str:
        return f", {shown_seconds(option.exchange_ns / NS_PER_S)} of it exchange" if option.exchange_ns else ""

    def lacks(option: _Option) -> str:
        return f", {option.lacking_bytes:,} bytes more than a rank has" if option.lacking_bytes else ""

    others = "; ".join(
        f"{name} {shown_seconds(option.total_ns / NS_PER_S)}{exchange(option)}{lacks(option)}"
        for name, option in options.items()
        if name != method
    )
    chosen = options[method]
    cut = f"; {chosen.words}" if chosen.words else ""
    return f"{method}: {shown_seconds(chosen.total_ns / NS_PER_S)} predicted{exchange(chosen)}{lacks(chosen)}{cut}" + (
        f" ({others})." if others else "."
    )


def _check(phases: Sequence[Phase], methods: Sequence[str]) -> None:
    if not methods or set(methods) - set(get_args(Method)):
        raise ArgumentError(f"methods is {methods!r}; it must hold some of {', '.join(get_args(Method))}.")
    if "mixed" in methods and "joint" not in methods:
        raise ArgumentError(f"methods is {methods!r}; mixed begins with joint, so it must hold joint as well.")
    check_phases(phases)
    if "split" in methods and (phases[0].rows is None or not isinstance(phases[0].cost, Packed)):
        raise ArgumentError(
            f"methods holds split, which takes rows of the backbone and a packed cost; its phase has {phases[0].cost}"
            f"{' and no rows' if phases[0].rows is None else ''}."
        )
