"""Exchange mode of a loop of one's own: each rank loads its own examples, then sends items to who computes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from motet.assign.orchestrator import Orchestrator
from motet.core.errors import UserError
from motet.dispatch.batch import assemble
from motet.dispatch.items import ItemExchange
from motet.dispatch.loaded import LoadedExample, Measure, tables_of
from motet.dispatch.loop_source import LoopTurn, Status, behind, set_epoch


class ExchangeSource:
    """A LoopSource of the examples of any loader."""

    num_ahead = 0

    def __init__(
        self, loader: Any, orchestrator: Orchestrator, measures: Mapping[str, Measure], group: dist.ProcessGroup
    ) -> None:
        self._loader = loader
        # accelerate's loaders have the methods, and call those of the loader inside.
        inside = getattr(loader, "base_dataloader", loader)
        self._is_stateful = hasattr(inside, "state_dict") and hasattr(inside, "load_state_dict")
        self._exchange = ItemExchange(group, orchestrator, measures)
        self._first_batch, self._goes_on = 0, False
        self._iterator: Iterator | None = None
        self._has_ended = False

    def begin(self, first_batch: int) -> None:
        """As `LoopSource.begin`; a loader that goes on by a state of its own skips no batch here."""
        # A loader that goes on by its own state skips by itself.
        self._first_batch, self._goes_on = 0 if self._goes_on else first_batch, False
        self._iterator, self._has_ended = None, False

    def end(self) -> None:
        """As `LoopSource.end`."""
        self._iterator = None

    def set_epoch(self, epoch: int) -> None:
        """As `LoopSource.set_epoch`."""
        set_epoch(self._loader, epoch)

    def load_state(self, state: Any) -> None:
        """As `LoopSource.load_state`; nothing for a loader that keeps no state."""
        # Between epochs there is none, nor of a loader that kept none when the position was saved.
        self._goes_on = self._is_stateful and state is not None
        if self._goes_on:
            self._loader.load_state_dict(state)

    def turn(self, *, is_closing: bool) -> LoopTurn:
        """As `LoopSource.turn`: a batch of the loader, whose items are exchanged. A collective."""
        examples: Sequence[LoadedExample | None] = []
        status, error = Status.CLOSING if is_closing else Status.READY, None
        try:
            if not is_closing:
                loaded = self._next()
                status = Status.ENDED if loaded is None else Status.READY
                examples = [] if loaded is None else self._checked(loaded)
        except Exception as failure:
            error, examples = failure, []
        # Whatever has happened here, other ranks wait for this rank's examples.
        try:
            items = self._exchange(examples)
            batch = assemble(items.decision, items.lengths, self._exchange.rank, items.sequences, items.media)
            state = self._loader.state_dict() if self._is_stateful else None
        except Exception as failure:
            return LoopTurn(Status.FAILED, error=error or failure)
        return LoopTurn(Status.FAILED if error else status, batch, error, int(np.count_nonzero(~items.kept)), state)

    def _next(self) -> Any:
        """The loader's next batch; None behind the last."""
        if self._has_ended:
            return None
        if self._iterator is None:
            self._iterator = behind(self._loader, self._first_batch)
        batch = next(self._iterator, None)
        self._has_ended = batch is None
        return batch

    def _checked(self, examples: Any) -> Sequence[LoadedExample | None]:
        """The examples, all of which the exchange can take. Raises UserError."""
        if not isinstance(examples, list | tuple) or not all(
            isinstance(example, LoadedExample | None) for example in examples
        ):
            kind = type(examples).__name__
            inside = {type(each).__name__ for each in examples} if isinstance(examples, list | tuple) else set()
            raise UserError(
                f"The loader gave a {kind}{' of ' + ', '.join(sorted(inside)) if inside else ''}, and prefetched takes "
                "lists of motet.dispatch.LoadedExample: return them from the dataset, and set collate_fn=list."
            )
        phases = self._exchange.orchestrator.encoders
        for index, example in enumerate(examples):
            if example is not None and (unknown := set(example.sequence.media) - set(phases)):
                raise UserError(
                    f"Example {index} of a batch has an item of phase {sorted(unknown)[0]!r}, and measures are given "
                    f"for {', '.join(phases) or 'none'}."
                )
        try:
            tables_of(examples, phases, self._exchange.measures)
        except Exception as error:
            raise UserError(f"An example of the loader cannot be used: {error}.") from error
        return examples
