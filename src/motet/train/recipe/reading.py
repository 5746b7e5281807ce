"""Reads a recipe: its TOML, what `--set` overrides, and the training phase that is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from motet.core.errors import UserError
from motet.core.text_files import KeyPath, parse_toml, read_text
from motet.train.recipe.phases import check_handed_on, phases_in, tables_of_phase
from motet.train.recipe.toml_text import key_of, set_key

_CHOICE = "run.phase"
_START = ("run", "start")


class RecipeText(NamedTuple):
    """A recipe before it is validated. set_keys: keys in `tables` that the command line has set.

    phase: the number of the training phase that `tables` are of; None if the recipe has none.
    """

    text: str
    tables: dict[str, Any]
    set_keys: set[KeyPath]
    phase: int | None = None


def phase_names(path: Path, overrides: Sequence[str] = ()) -> tuple[str, ...]:
    """The names of a recipe's training phases, in their order; () if it has none, or if `overrides` choose one.

    Raises UserError as `read_recipe` does.
    """
    if _chosen(overrides)[0] is not None:
        return ()
    text = read_text(path, "the recipe")
    return tuple(phase.name for phase in phases_in(path, text, parse_toml(text, str(path))))


def of_phase(overrides: Sequence[str], name: str) -> list[str]:
    """Overrides that choose a training phase, too."""
    return [*overrides, f"{_CHOICE}={name}"]


def of_phases(overrides: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Phase -> overrides that choose it, too. `run.start` is of the first: the others begin where one before ended."""
    later = [override for override in overrides if key_of(override) != _START]
    return {name: of_phase(later if number else overrides, name) for number, name in enumerate(names)}


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> RecipeText:
    """Read a recipe, and apply overrides, which outweigh what a phase says.

    A training phase is a run in a folder of its own, and begins with the last checkpoint of the phase before.
    Raises UserError for a missing file, no TOML, a wrong override, wrong phases, and if there are phases and the
    overrides choose none.
    """
    text = read_text(path, "the recipe")
    tables = parse_toml(text, str(path))
    name, others = _chosen(overrides)
    phases = phases_in(path, text, tables)
    if not phases and name is None:
        return RecipeText(text, tables, {set_key(tables, override) for override in others})
    if name is None:
        names = ", ".join(phase.name for phase in phases)
        raise UserError(f"{path} trains in phases ({names}): choose one with --set {_CHOICE}={phases[0].name}.")
    own, number = tables_of_phase(path, text, tables, phases, name)
    set_keys = {set_key(own, override) for override in others}
    saving = own.get("checkpoint")
    if isinstance(saving, dict) and isinstance(saving.get("url"), str):
        saving["url"] = f"{saving['url']}/{name}"
    folder = own["run"].get("dir")
    if isinstance(folder, str):
        own["run"]["dir"] = str(Path(folder, name))
    if number > 0 and _START not in set_keys:
        before, _ = tables_of_phase(path, text, tables, phases, phases[number - 1].name)
        for override in others:
            with suppress(UserError):  # This phase may have alone what is removed.
                set_key(before, override)
        check_handed_on(path, text, phases, number, (before.get("model"), own.get("model")))
        # A start that [run] states is that of the first phase.
        if isinstance(folder, str):
            own["run"]["start"] = _end_of(Path(folder, phases[number - 1].name), before["run"].get("steps"))
    return RecipeText(text, own, set_keys, number)


def _end_of(folder: Path, steps: Any) -> str:
    """The last checkpoint of a phase; where epochs say when it ends, its folder, which stands for that one."""
    from motet.train.checkpoint.contents import CHECKPOINTS, name_of

    return str(folder / CHECKPOINTS / name_of(steps) if isinstance(steps, int) else folder)


def _chosen(overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """The phase that overrides choose, None if they choose none, and the other overrides."""
    chosen, others = list[str](), list[str]()
    for override in overrides:
        key, _, value = override.partition("=")
        if key.strip() == _CHOICE:
            chosen.append(value.strip())
        else:
            others.append(override)
    return chosen[-1] if chosen else None, others
