"""What else balances items over ranks: packages from PyPI, and two habits that need none. Run by balance.py.

    python peers.py NAME

imports one peer, says on a line whether it is there, then answers jobs, each a line of JSON: {"lengths", "weights",
"num_ranks"} -> {"seconds", "ranks"}. It runs in a process of its own, since some take minutes and have to be stopped,
and in an environment of its own if need be, since some cannot share Motet's (see requirements.txt). Free of motet.
"""

from __future__ import annotations

import heapq
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

Lengths = list[int]
Balance = Callable[[Lengths, Lengths, int], Iterable[Iterable[int]]]
"""lengths, weights (what the sum on a rank is to be even in), num_ranks -> the items of each rank."""


@dataclass(frozen=True)
class Peer:
    """load: imports the package and gives the function. install: what pip is told."""

    load: Callable[[], Balance]
    install: str = ""


def heapq_lpt() -> Balance:
    def balance(_: Lengths, weights: Lengths, num_ranks: int) -> list[list[int]]:
        ranks: list[list[int]] = [[] for _ in range(num_ranks)]
        queue = [(0, rank) for rank in range(num_ranks)]
        for item in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):
            load, rank = queue[0]
            ranks[rank].append(item)
            heapq.heapreplace(queue, (load + weights[item], rank))
        return ranks

    return balance


def sorted_chunks() -> Balance:
    def balance(_: Lengths, weights: Lengths, num_ranks: int) -> list[list[int]]:
        items = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
        cuts = [rank * len(items) // num_ranks for rank in range(num_ranks + 1)]
        return [items[first:last] for first, last in pairwise(cuts)]

    return balance


def verl(equal_size: bool) -> Balance:
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    return lambda _, weights, num_ranks: get_seqlen_balanced_partitions(weights, num_ranks, equal_size)


def veomni() -> Balance:
    """Its LPT on squared lengths. The file is loaded by its path: the package imports all models first."""
    import torch

    package = importlib.util.find_spec("veomni")
    if package is None or package.origin is None:
        raise ImportError("veomni")
    path = Path(package.origin).parent / "utils" / "data_balance" / "balance_sorting_algo.py"
    spec = importlib.util.spec_from_file_location("balance_sorting_algo", path)
    if spec is None or spec.loader is None:
        raise ImportError(str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def balance(lengths: Lengths, _: Lengths, num_ranks: int) -> list[list[int]]:
        rows = torch.stack([torch.tensor(lengths), torch.arange(len(lengths))], dim=1)
        return [rank[:, 1].tolist() for rank in module.post_mbs_balancing_greedy_without_pad(rows, num_ranks, 0)]

    return balance


def prtpy(algorithm: str) -> Balance:
    import prtpy

    chosen = getattr(prtpy.partitioning, algorithm)
    return lambda _, weights, num_ranks: prtpy.partition(chosen, num_ranks, dict(enumerate(weights)))


def numberpartitioning(algorithm: str) -> Balance:
    import numberpartitioning

    chosen = getattr(numberpartitioning, algorithm)
    return lambda _, weights, num_ranks: chosen(weights, num_ranks, return_indices=True).partition


def binpacking() -> Balance:
    import binpacking

    return lambda _, weights, num_ranks: binpacking.to_constant_bin_number(dict(enumerate(weights)), num_ranks)


PEERS = {
    "heapq LPT": Peer(heapq_lpt),
    "sorted, equal counts": Peer(sorted_chunks),
    "verl KK": Peer(lambda: verl(equal_size=False), "--no-deps verl"),
    "verl KK, equal size": Peer(lambda: verl(equal_size=True), "--no-deps verl"),
    "veomni, squares": Peer(veomni, "--no-deps veomni"),
    "prtpy greedy": Peer(lambda: prtpy("greedy"), "prtpy"),
    "prtpy KK": Peer(lambda: prtpy("kk"), "prtpy"),
    "prtpy multifit": Peer(lambda: prtpy("multifit"), "prtpy"),
    "numberpartitioning greedy": Peer(lambda: numberpartitioning("greedy"), "numberpartitioning"),
    "numberpartitioning KK": Peer(lambda: numberpartitioning("karmarkar_karp"), "numberpartitioning"),
    "binpacking": Peer(binpacking, "binpacking"),
}


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what packages print is no answer

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        balance = PEERS[sys.argv[1]].load()
    except ImportError as error:
        answer(missing=str(error))
        return
    answer(missing=None)
    for line in sys.stdin:
        job = json.loads(line)
        start = time.perf_counter()
        groups = balance(job["lengths"], job["weights"], job["num_ranks"])
        seconds = time.perf_counter() - start
        ranks = [-1] * len(job["weights"])
        for rank, group in enumerate(groups):
            for item in group:
                ranks[item] = rank
        answer(seconds=seconds, ranks=ranks)


if __name__ == "__main__":
    main()
