"""Which way the phases of a step are balanced together: predict the seconds of each way, take the fastest, say why.

joint      whole examples, one assignment for all phases: encoder outputs stay on the rank that runs their sequence.
per_phase  each phase by itself (OrchMLLM, arXiv:2503.23830, sections 5 and 6): every phase at its best, and encoder
           outputs cross ranks, forward and as gradients back: the excess of packed ones, most of padded ones.
mixed      joint, but for the encoders that gain more from an assignment of their own than its exchange takes: padded
           ones mostly, whose cost, count times longest, no assignment of whole examples can balance.
split      joint, with the examples that dominate cut into fragments (splitting.py): a decision that training cannot run
           yet, so it is considered only where it is asked for.

Predicted is the sum over phases of the busiest rank's seconds, as ranks wait for each other in every phase (sharded
modules gather their weights layer by layer), and, for each encoder that moves outputs, the exchange: what the slowest
rank takes for its bytes inside its node and between nodes (`core/exchange.py`). Everything is compared in whole
nanoseconds, so all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from numpy.typing import ArrayLike

from motet.balance.backend import Backend
from motet.balance.checks import checked_num_ranks, checked_ranks
from motet.balance.costs import Packed, Padded
from motet.balance.fragments import Overhead, Split
from motet.balance.joint import assign_jointly
from motet.balance.phases import NS_PER_S, Phase, assign_apart, check_phases, follow, joint_costs, scored_phase
from motet.balance.placement import assign, score
from motet.balance.splitting import split
from motet.core.assignment import Assignment
from motet.core.cluster import Link
from motet.core.errors import ArgumentError
from motet.core.exchange import Network, moved

Method = Literal["joint", "mixed", "per_phase", "split"]
METHODS: tuple[Method, ...] = ("joint", "mixed", "per_phase")
"""Those that training can run, what moves less first: so a tie is broken."""
UNBALANCED = "unbalanced"


@dataclass(frozen=True, eq=False)
class Choice:
    """The fastest way, as predicted.

    assignments: one a phase, in the order of the phases. Items of an encoder that follows its examples are in the
                 order of the examples' slots, so that its outputs need not even be sorted. With "split", those of
                 "joint", the nearest for whole items.
    fragments:   with "split", the examples and the fragments of examples, and where each is computed; else None.
    predicted_s: seconds of the step by method, with "unbalanced" where the homes of the examples were given.
    exchange_s:  of those, what moving encoder outputs takes.
    moved_bytes: that cross ranks, over all encoders, both ways.
    why:         a sentence with the figures.
    """

    method: Method
    assignments: tuple[Assignment, ...]
    fragments: Split | None
    predicted_s: dict[str, float]
    exchange_s: dict[str, float]
    moved_bytes: int
    why: str

    @property
    def predicted_ns(self) -> int:
        """What was compared: nanoseconds of the method that was chosen."""
        return round(self.predicted_s[self.method] * NS_PER_S)


@dataclass(frozen=True, eq=False)
class _Way:
    """One way to place all phases, and what it takes."""

    assignments: tuple[Assignment, ...]
    compute_ns: int
    exchange_ns: int
    moved_bytes: int
    fragments: Split | None = None

    @property
    def total_ns(self) -> int:
        return self.compute_ns + self.exchange_ns

    @property
    def key(self) -> tuple[int, int]:
        """What ways are compared by."""
        return self.total_ns, self.moved_bytes


def choose(
    phases: Sequence[Phase],
    num_ranks: int,
    link: Link | Network,
    *,
    methods: Sequence[Method] = METHODS,
    home: ArrayLike | None = None,
    overhead: Overhead | None = None,
    backend: Backend = "native",
) -> Choice:
    """Choose between `methods` for one microbatch. phases: the backbone first, whose items are the examples.

    link: what an exchange takes; a Link where all ranks share a node.
    home: int [num_examples], where examples are computed without balancing; only to say what balancing gains.
    overhead: of a fragment, for "split"; its fixed part in nanoseconds.

    However long an item is, the microbatch is balanced: what dominates a phase leaves the others to be balanced beside
    it. Ties go to what moves fewer bytes, then to the earlier of `methods`. Takes up to three `assign` a phase and two
    `assign_jointly`; a pure function of its arguments. Raises ArgumentError for wrong arguments.
    """
    num_ranks = checked_num_ranks(num_ranks)
    _check(phases, methods, overhead)
    network = Network.of(link)
    # 1. Every way that was asked for, with its prediction.
    ways: dict[str, _Way] = {}
    if "per_phase" in methods:
        backbone = assign(phases[0].lengths, num_ranks, phases[0].cost, backend=backend)
        ways["per_phase"] = _way(
            phases, network, [backbone, *(_apart(phase, backbone, backend) for phase in phases[1:])]
        )
    if "joint" in methods:
        ways["joint"] = _follow_all(phases, network, _backbone(phases, num_ranks, backend), {})
        if "mixed" in methods and (mixed := _mixed(phases, num_ranks, network, ways["joint"], backend)):
            ways["mixed"] = mixed
        if overhead is not None and "split" in methods:
            ways["split"] = _split(phases, num_ranks, ways["joint"], overhead, backend)
    # 2. The fastest.
    method = min((name for name in methods if name in ways), key=lambda name: ways[name].key)
    if home is not None:
        ranks = checked_ranks(home, "home", len(phases[0].lengths), num_ranks)
        ways[UNBALANCED] = _follow_all(phases, network, scored_phase(phases[0], ranks, num_ranks), {})
    return Choice(
        method=method,
        assignments=ways[method].assignments,
        fragments=ways[method].fragments,
        predicted_s={name: way.total_ns / NS_PER_S for name, way in ways.items()},
        exchange_s={name: way.exchange_ns / NS_PER_S for name, way in ways.items()},
        moved_bytes=ways[method].moved_bytes,
        why=_why(method, ways),
    )


def _mixed(phases: Sequence[Phase], num_ranks: int, network: Network, joint: _Way, backend: Backend) -> _Way | None:
    """Joint without the encoders that are better off alone; None where those are none, or all of them."""
    backbone = joint.assignments[0]
    leaving = []
    for phase, placed in zip(phases[1:], joint.assignments[1:], strict=True):
        own = _apart(phase, backbone, backend)
        exchange_ns, _ = _exchange(phase, own, backbone, network)
        if phase.compute_ns(own) + exchange_ns < phase.compute_ns(placed):
            leaving.append(phase)
    together = [phase for phase in phases if phase not in leaving]
    if not leaving or len(together) == 1:
        return None
    # With fewer phases to serve, the joint assignment serves them better.
    backbone = _backbone(together, num_ranks, backend)
    return _follow_all(phases, network, backbone, {phase.name: _apart(phase, backbone, backend) for phase in leaving})


def _apart(phase: Phase, backbone: Assignment, backend: Backend) -> Assignment:
    return assign_apart(phase.lengths, phase.cost, phase.owner, backbone, backend)


def _split(phases: Sequence[Phase], num_ranks: int, joint: _Way, overhead: Overhead, backend: Backend) -> _Way:
    """Whole examples but for those that dominate; a fragment has the same share of every phase of its example."""
    costs, unit_s = joint_costs(phases)
    in_units = Overhead(round(overhead.fixed / NS_PER_S / unit_s), overhead.fraction)
    fragments = split(costs, num_ranks, in_units, backend=backend)
    compute_ns = 0
    for phase, column in zip(phases, fragments.costs.T, strict=True):
        # A padded phase is computed with padding also where its items are cut.
        cost = Packed() if isinstance(phase.cost, Packed) else Padded()
        loads = score(fragments.assignment.ranks, column, num_ranks, cost).loads
        compute_ns += round(int(loads.max()) * unit_s * NS_PER_S)
    return replace(joint, compute_ns=compute_ns, fragments=fragments)


def _backbone(phases: Sequence[Phase], num_ranks: int, backend: Backend) -> Assignment:
    """The backbone's part of the assignment of whole examples that serves all of `phases`, the backbone first."""
    ranks = assign_jointly(joint_costs(phases)[0], num_ranks, backend=backend).ranks
    return scored_phase(phases[0], ranks, num_ranks)


def _follow_all(phases: Sequence[Phase], network: Network, backbone: Assignment, apart: dict[str, Assignment]) -> _Way:
    """The backbone as given; encoders follow their examples, but for those that are placed apart."""
    encoders = [apart[phase.name] if phase.name in apart else follow(phase, backbone) for phase in phases[1:]]
    return _way(phases, network, [backbone, *encoders])


def _way(phases: Sequence[Phase], network: Network, assignments: Sequence[Assignment]) -> _Way:
    exchanges = [
        _exchange(phase, placed, assignments[0], network)
        for phase, placed in zip(phases[1:], assignments[1:], strict=True)
    ]
    return _Way(
        tuple(assignments),
        sum(phase.compute_ns(placed) for phase, placed in zip(phases, assignments, strict=True)),
        sum(nanoseconds for nanoseconds, _ in exchanges),
        sum(moved_bytes for _, moved_bytes in exchanges),
    )


def _exchange(phase: Phase, placed: Assignment, backbone: Assignment, network: Network) -> tuple[int, int]:
    """Nanoseconds of bringing a phase's outputs to their examples and gradients back, and the bytes that cross."""
    destination = backbone.ranks[phase.owner]
    moves = placed.ranks != destination
    if phase.output_bytes is None or not moves.any():
        return 0, 0
    size_bytes = moved(placed.ranks, destination, phase.output_bytes, network.nodes(placed.num_ranks))
    # Gradients go the same way back, so the slowest rank of the one is that of the other.
    seconds = phase.num_exchanges * float(network.exchange_s(size_bytes)[0])
    return round(seconds * NS_PER_S), phase.num_exchanges * int(phase.output_bytes[moves].sum())


def _why(method: Method, ways: dict[str, _Way]) -> str:
    def exchange(way: _Way) -> str:
        return f", {as_ms(way.exchange_ns)} of it exchange" if way.exchange_ns else ""

    others = "; ".join(f"{name} {as_ms(way.total_ns)}{exchange(way)}" for name, way in ways.items() if name != method)
    chosen = ways[method]
    return f"{method}: {as_ms(chosen.total_ns)} predicted{exchange(chosen)}" + (f" ({others})." if others else ".")


def as_ms(nanoseconds: int) -> str:
    """Milliseconds to three digits, for people."""
    milliseconds = nanoseconds / 1e6
    return f"{milliseconds:,.0f} ms" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"


def _check(phases: Sequence[Phase], methods: Sequence[str], overhead: Overhead | None) -> None:
    if not methods or set(methods) - set(get_args(Method)):
        raise ArgumentError(f"methods is {methods!r}; it must hold some of {', '.join(get_args(Method))}.")
    if {"mixed", "split"} & set(methods) and "joint" not in methods:
        raise ArgumentError(f"methods is {methods!r}; mixed and split begin with joint, so it must hold that as well.")
    if ("split" in methods) != (overhead is not None):
        raise ArgumentError(f"overhead is {overhead}; it must be given where methods holds split, and only there.")
    check_phases(phases)
