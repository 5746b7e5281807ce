"""Which phases compute the items of examples, and what an example's sequence becomes by that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from motet.core.alternating import alternating
from motet.core.arrays import IndexArray, Int64Array
from motet.core.errors import UserError
from motet.core.example import TokenSequence, in_pieces, moved_turns
from motet.core.grid_positions import GRID_DIM, NUM_AXES
from motet.core.modalities import IMAGE
from motet.core.modalities import modalities as all_modalities
from motet.core.readers import Combine, combine_error
from motet.core.workload import ItemLengths
from motet.data.example_lengths import ExampleLengths
from motet.data.index import Index, LengthColumns
from motet.data.media import IN_ANSWER, MediaRef
from motet.data.modality import Modality
from motet.data.transforms import kinds_of


class ItemPhases:
    """The phases that compute items: encoders read them, or generators make those of answers.

    modalities:    by name of phase.
    makers:        kind of media -> the generators that make its items in answers.
    readers:       kind of media -> the encoders that read its items.
    combine:       as `combine_error` checks it.
    tells_several: whether a transform is told of images beside others.

    Example: `ItemPhases({"vision": modality}, {}).of_item(MediaRef("image", "a.png"))` is `("vision",)`.
    """

    def __init__(self, modalities: Mapping[str, Modality], combine: Mapping[str, Combine]) -> None:
        """Raises UserError if `combine` does not fit the readers."""
        self.modalities = dict(modalities)
        self.makers = _readers({name: each for name, each in self.modalities.items() if each.is_made}, {})
        read = {name: each for name, each in self.modalities.items() if not each.is_made}
        self.readers, self.combine = _readers(read, combine), dict(combine)
        transforms = (each.transform for each in self.modalities.values())
        self.tells_several = any(getattr(each, "tells_several", False) for each in transforms)
        if self.tells_several and (len(self.readers.get(IMAGE, ())) > 1 or IMAGE in self.makers):
            raise ValueError("a transform that is told of several images must be the only one of images")

    def check_reads(self, index: Index) -> None:
        """Raise UserError if an index has items that no phase computes."""
        for code, modality in enumerate(all_modalities()):
            codes = {code} if modality in self.makers else {code, code + IN_ANSWER}
            if modality not in self.readers and np.isin(index.lengths.modality, list(codes)).any():
                where = ", in turns that are not the assistant's" if modality in self.makers else ""
                reads = ", ".join(name for name in all_modalities() if name in self.readers) or "text alone"
                raise UserError(
                    f"{index.source} holds {modality} media{where}, but the model has no encoder for them (it reads "
                    f"{reads}); leave such examples out, or train a model that has one"
                )

    def of_item(self, ref: MediaRef) -> tuple[str, ...]:
        """The phases that compute an item, in their order: of generators, if it is theirs to make."""
        if ref.in_answer and (makers := self.makers.get(ref.modality)):
            return makers
        return self.readers[ref.modality]

    def is_added(self, phase: str) -> bool:
        """Whether the rows of a phase are added to those of the first phase that reads the same items."""
        modality = self.modalities[phase].transform.modality
        if self.modalities[phase].is_made:
            return False
        return self.combine.get(modality) == "sum" and self.readers[modality][0] != phase

    def takes_rows(self, phase: str) -> bool:
        """Whether items of a phase have rows of their own in the sequence."""
        return not (self.is_added(phase) or self.modalities[phase].max_turn)

    def items_of(self, columns: ExampleLengths | LengthColumns, modality: Modality) -> IndexArray:
        """The items that a modality reads, or makes, [n] indexes into the items of `columns`."""
        codes = []
        for kind in kinds_of(modality.transform):
            code = all_modalities().index(kind)
            codes += [] if modality.is_made else [code]
            codes += [code + IN_ANSWER] if modality.is_made or kind not in self.makers else []
        return np.flatnonzero(np.isin(columns.modality, codes))

    def item_lengths(self, columns: ExampleLengths) -> tuple[dict[str, ItemLengths], Int64Array, Int64Array]:
        """The items of each phase, the length of each example's sequence, int64 [num_examples], and the rows that each
        item takes in it, marks between them included, int64 [num_items].
        """
        rows, items = np.zeros(len(columns.example), dtype=np.int64), {}
        for name, modality in self.modalities.items():
            of_phase = self.items_of(columns, modality)
            length = num_tokens = np.zeros(0, dtype=np.int64)
            segments, marks = None, length
            if len(of_phase):
                sizes = modality.transform.sizes(columns.raw[of_phase])
                length = np.asarray(modality.lengths(sizes), dtype=np.int64)
                num_tokens = np.asarray(modality.num_tokens(sizes), dtype=np.int64)
                segments = modality.segments(sizes) if modality.segments else None
                marks = modality.num_marks(columns.raw[of_phase])
            items[name] = ItemLengths(columns.example[of_phase], length, num_tokens, segments)
            if not self.is_added(name):
                rows[of_phase] += num_tokens + marks
        for name, modality in self.modalities.items():
            if modality.max_turn:
                of_phase = self.items_of(columns, modality)
                items[name] = replace(items[name], num_tokens=columns.turn_rows(rows)[of_phase])
        # The rows of its item replace each placeholder.
        sequence = columns.num_tokens - columns.num_items
        np.add.at(sequence, columns.example, rows)
        return items, sequence, rows

    def with_phases(self, tokens: TokenSequence, refs: Sequence[MediaRef]) -> TokenSequence:
        """The same tokens with names of phases in place of modalities.

        refs: its items, or these and later ones; they are read if there are generators.

        Where several phases read an item, it has a placeholder for each, or one place for all whose rows are added.
        """
        if self.makers:
            phases = [self.of_item(ref) for ref in refs[: len(tokens.media)]]
        else:
            phases = [self.readers[modality] for modality in tokens.media]
        media = tuple(phase for of_item in phases for phase in of_item)
        turns = self._turns(tokens, phases)
        if len(media) == len(tokens.media):
            return TokenSequence(tokens.tokens, tokens.targets, media, tokens.media_positions, turns=turns)
        counts = np.array([len(of_item) for of_item in phases], dtype=np.int64)
        is_added = np.array([self.is_added(of_item[-1]) for of_item in phases])
        repeats = np.ones(len(tokens.tokens), dtype=np.int64)
        repeats[tokens.media_positions] = np.where(is_added, 1, counts)
        starts = np.cumsum(repeats) - repeats
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = np.repeat(starts[tokens.media_positions], counts) + np.where(np.repeat(is_added, counts), 0, number)
        return TokenSequence(
            np.repeat(tokens.tokens, repeats),
            np.repeat(tokens.targets, repeats),
            media,
            positions.astype(np.int64),
            turns=moved_turns(turns, repeats),
        )

    def _turns(self, tokens: TokenSequence, phases: Sequence[tuple[str, ...]]) -> Int64Array | None:
        """The turns that items of several phases read, int64 [num_items of all phases, 2]; None: there are none."""
        if tokens.turns is None or not any(modality.max_turn for modality in self.modalities.values()):
            return None
        reads = [self.modalities[phase].max_turn > 0 for of_item in phases for phase in of_item]
        of_items = np.repeat(tokens.turns, [len(of_item) for of_item in phases], axis=0)
        return np.where(np.array(reads, dtype=bool)[:, None], of_items, 0)

    def with_sizes(self, tokens: TokenSequence, media_refs: Callable[[], list[MediaRef]]) -> TokenSequence:
        """The same tokens with what follows from sizes of their items: their grids, or the pieces of their rows.

        media_refs: reads its items, and perhaps later ones; called only where something follows.
        """
        phases = [self.modalities[phase] for phase in tokens.media]
        if not any(modality.grids or modality.item_text for modality in phases):
            return tokens
        refs = [ref for ref in media_refs() for _ in self.of_item(ref)]
        headers = [np.array([ref.raw], dtype=np.int64) for ref in refs]
        texts = [modality.texts(header)[0][0] for modality, header in zip(phases, headers)]
        if any(texts):
            tokens = in_pieces(tokens, texts)
        if not any(modality.grids for modality in phases):
            return tokens
        grids = np.zeros((len(tokens.media), GRID_DIM), dtype=np.int64)
        for number, (modality, header) in enumerate(zip(phases, headers)):
            assert modality.grids is not None, "a phase whose rows have no grid beside one whose rows have"
            steps = getattr(modality.transform, "time_steps", None)
            grids[number, :NUM_AXES] = modality.grids(modality.transform.sizes(header))[0]
            grids[number, NUM_AXES:] = 0 if steps is None else steps(header)[0], modality.behind
        sounds = [number for number, ref in enumerate(refs[: len(phases)]) if ref.is_sound_of_video]
        if sounds:
            chunk = getattr(phases[sounds[0] - 1].transform, "sound_chunk", None)
            assert chunk is not None, "the sound of a video is read, and how it alternates with frames is not said"
            return alternating(replace(tokens, grids=grids), [number - 1 for number in sounds], chunk)
        # Of an item in several pieces each has as many of its frames.
        grids[:, 0] //= tokens.num_pieces
        return replace(tokens, grids=np.repeat(grids, tokens.num_pieces, axis=0))


def _readers(modalities: Mapping[str, Modality], combine: Mapping[str, Combine]) -> dict[str, tuple[str, ...]]:
    readers: dict[str, tuple[str, ...]] = {}
    for name, modality in modalities.items():
        for kind in kinds_of(modality.transform):
            if kind not in all_modalities():
                held = " and ".join(all_modalities())
                raise UserError(f"encoder {name} reads '{kind}', but manifests hold only {held}")
            readers[kind] = (*readers.get(kind, ()), name)
    if wrong := combine_error(readers, combine):
        raise UserError(f"{wrong}.")
    return readers
