"""`[[run.phase]]`: training phases, each a run of its own that begins with the weights of the one before.

The recipe of a phase is the whole recipe with what the phase says in its place. So all that reads a recipe reads one of
a phase: `--set run.phase=NAME` chooses it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from motet.core.errors import UserError
from motet.core.limits import MAX_EXAMPLES, MAX_STEPS
from motet.core.text_files import KeyPath
from motet.train.recipe.errors import place_of, recipe_error

_KEY = ("run", "phase")
_OWN = ("name", "learns")
"""Keys of a phase that no other table of a recipe has."""
_ALL, _BACKBONE, _ENCODERS, _PROJECTORS = "all", "backbone", "encoders", "projectors"


class TrainingPhase(BaseModel):
    """`[[run.phase]]` of a recipe: keys of `[run]`, and tables of the recipe; what it says outweighs the recipe's own.

    Example:
        >>> phase = TrainingPhase(name="align", steps=100, learns="projectors", optimizer={"lr": 1e-3})
        >>> phase.learns
        ('projectors',)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="of the phase, and of its folder in run.dir: letters, digits, - and _",
    )
    steps: int | None = Field(
        None, gt=0, le=MAX_STEPS, description="optimizer steps of the phase; it, or epochs, must be given"
    )
    epochs: float | None = Field(None, gt=0, le=MAX_STEPS, allow_inf_nan=False, description="as run.epochs")
    learns: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="the parts that learn, one or a list; all others are frozen: all, backbone, encoders, projectors, "
        "an encoder or a generator by its name (its projector too), generators, NAME.encoder, NAME.generator, "
        "NAME.projector. Default: as [model] says",
    )
    batch_size: int | None = Field(None, gt=0, le=MAX_EXAMPLES, description="as run.batch_size")
    microbatches: int | None = Field(None, gt=0, le=MAX_EXAMPLES, description="as run.microbatches")
    seed: int | None = Field(None, description="as run.seed")
    plan: str | None = Field(None, description="as run.plan")
    model: dict[str, Any] | None = Field(None, description="keys of [model] in this phase, such as freeze")
    data: dict[str, Any] | None = Field(None, description="keys of [data] in this phase, such as train and mixture")
    optimizer: dict[str, Any] | None = Field(None, description="keys of [optimizer] in this phase, such as lr")
    balance: dict[str, Any] | None = Field(None, description="keys of [balance] in this phase")
    fsdp: dict[str, Any] | None = Field(None, description="keys of [fsdp] in this phase")
    parallel: dict[str, Any] | None = Field(None, description="keys of [parallel] in this phase: it is planned anew")
    checkpoint: dict[str, Any] | None = Field(None, description="keys of [checkpoint] in this phase")
    evaluate: dict[str, Any] | None = Field(None, description="keys of [evaluate] in this phase")
    export: dict[str, Any] | None = Field(
        None, description="keys of [export] in this phase; without them the last phase alone exports"
    )

    @field_validator("learns", mode="before", json_schema_input_type=str | tuple[str, ...])
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else given

    @model_validator(mode="after")
    def _has_an_end(self) -> TrainingPhase:
        if self.steps is None and self.epochs is None:
            raise ValueError(f"phase {self.name} has neither steps nor epochs; give one of them")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"phase {self.name} has steps and epochs, which both say how long it runs; remove one")
        return self


class _Run(BaseModel):
    model_config = ConfigDict(extra="ignore", defer_build=True)
    phase: tuple[TrainingPhase, ...] = Field(min_length=1)


class _Phased(BaseModel):
    """The tables of a recipe, of which the phases alone are looked at."""

    model_config = ConfigDict(extra="ignore", defer_build=True)
    run: _Run


def phases_in(path: Path, text: str, tables: dict[str, Any]) -> tuple[TrainingPhase, ...]:
    """The phases of a recipe, in their order; () if it has none.

    path: of the recipe, as the user gave it. text: its TOML. Raises UserError for what is wrong with one.
    """
    run = tables.get("run")
    if not isinstance(run, dict) or "phase" not in run:
        return ()
    try:
        phases = _Phased.model_validate_json(json.dumps(tables, default=str), strict=True).run.phase
    except ValidationError as error:
        raise UserError(recipe_error(error.errors(), _Phased, str(path), text, set())) from error
    for number, phase in enumerate(phases):
        if phase.name in (other.name for other in phases[:number]):
            where = place_of((*_KEY, number, "name"), str(path), text)
            raise UserError(f"{where}: two phases are named {phase.name!r}; each needs a name of its own.")
    for key in ("steps", "epochs"):
        if key in run:
            place = place_of(("run", key), str(path), text)
            raise UserError(f"{place}: run.{key} has no effect, as each phase has its own.")
    return phases


def tables_of_phase(
    path: Path, text: str, tables: dict[str, Any], phases: Sequence[TrainingPhase], name: str
) -> tuple[dict[str, Any], int]:
    """New tables of a recipe in the phase of a name, and the number of the phase.

    Raises UserError if there is no such phase, or if it names a part that the model has not.
    """
    number = next((number for number, phase in enumerate(phases) if phase.name == name), None)
    if number is None:
        names = ", ".join(phase.name for phase in phases)
        raise UserError(f"--set run.phase={name}: {path} has no such phase; it has {names or 'none'}.")
    phase, given = phases[number], tables["run"]["phase"][number]
    base = tables | {"run": {key: value for key, value in tables["run"].items() if key != "phase"}}
    if number + 1 < len(phases) and isinstance(base.get("export"), dict):
        # What the recipe says of an export is of the last phase: adapters, which this one need not have.
        base["export"] = {key: value for key, value in base["export"].items() if key != "adapter"} | {"at_end": False}
    if phase.learns is not None and isinstance(base.get("model"), dict):
        adapted = _merged(base["model"], phase.model or {}).get("lora")
        try:
            base["model"] = _learning(base["model"], phase.learns, is_drawn="workload" in tables)
            _check_adapted_learn(adapted, base["model"])
        except ValueError as error:
            raise UserError(f"{place_of((*_KEY, number, 'learns'), str(path), text)}: {error}.") from error
    of_run = {key: value for key, value in given.items() if key not in _OWN and not isinstance(value, dict)}
    of_tables = {key: value for key, value in given.items() if isinstance(value, dict)}
    return deepcopy(_merged(base, {"run": of_run} | of_tables)), number


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Two tables as one, the second before the first. Lists are values: they are not joined."""
    both = {key: (under.get(key), value) for key, value in over.items()}
    return under | {
        key: _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
        for key, (below, value) in both.items()
    }


def _learning(model: dict[str, Any], learns: Sequence[str], *, is_drawn: bool) -> dict[str, Any]:
    """`[model]` in which these parts learn and no others. is_drawn: whether it is of shapes, whose keys differ.

    Raises ValueError for a part that it has not.
    """
    if "path" in model:
        raise ValueError(
            "a model of model.path has the parts of its directory; in place of learns say which learn, such as model = "
            "{ train = { image = false, backbone = false } }"
        )
    encoders = model.get("encoders", {})
    if not isinstance(encoders, dict) or not all(
        isinstance(each, dict) for each in [model.get("backbone"), *encoders.values()]
    ):
        return model  # Refused where the recipe is validated.
    generators = model.get("generators", {})
    if not isinstance(generators, dict) or not all(isinstance(each, dict) for each in generators.values()):
        return model  # Likewise.
    halves_of = dict.fromkeys(encoders, ("encoder", "projector"))
    halves_of |= dict.fromkeys(generators, ("generator", "projector"))
    parts = {_BACKBONE, *(f"{name}.{half}" for name, halves in halves_of.items() for half in halves)}
    groups = {_ALL: parts, **{name: {f"{name}.{half}" for half in halves} for name, halves in halves_of.items()}}
    for kind in ("encoder", "projector", "generator"):
        if of_kind := {f"{name}.{kind}" for name, halves in halves_of.items() if kind in halves}:
            groups[f"{kind}s"] = of_kind
    groups |= {part: {part} for part in parts}
    chosen: set[str] = set()
    for name in learns:
        if name not in groups:
            raise ValueError(f"the model has no part {name!r} that could learn; it has {', '.join(sorted(groups))}")
        chosen |= groups[name]

    def learning(name: str, table: dict[str, Any]) -> dict[str, Any]:
        """The table of an encoder or a generator with which halves of it learn."""
        halves = {half: f"{name}.{half}" in chosen for half in halves_of[name]}
        if not is_drawn:
            return table | {f"train_{half}": learns for half, learns in halves.items()}
        (whole, learns), projector = halves.values(), table.get("projector", {})
        if not isinstance(projector, dict):
            return table  # Refused where the recipe is validated.
        return table | {"train": whole, "projector": projector | {"train": learns}}

    changed = {"backbone": model["backbone"] | {"train": _BACKBONE in chosen}}
    for kind, tables in (("encoders", encoders), ("generators", generators)):
        if tables or kind == "encoders":
            changed[kind] = {name: learning(name, table) for name, table in tables.items()}
    return model | changed


def _check_adapted_learn(adapted: Any, model: dict[str, Any]) -> None:
    """Raise ValueError for adapters of a part that does not learn. model: what `_learning` has made of it."""
    encoders = model.get("encoders", {})
    for name in adapted if isinstance(adapted, dict) else ():
        part, key = (model["backbone"], "train") if name == _BACKBONE else (encoders.get(name), "train_encoder")
        if isinstance(part, dict) and part.get(key) is False:
            raise ValueError(
                f"model.lora.{name} gives adapters to a part that does not learn in this phase; state it as model = "
                f"{{ lora = {{ {name} = ... }} }} of the phases in which it learns, or let {name} learn"
            )


def check_handed_on(
    path: Path, text: str, phases: Sequence[TrainingPhase], number: int, models: tuple[Any, Any]
) -> None:
    """Raise UserError unless a phase has the LoRA adapters of the phase before it, as it begins with them.

    models: `[model]` of the phase before, and of this one, before they are validated.
    """
    before, now = (model.get("lora", {}) if isinstance(model, dict) else {} for model in models)
    if not isinstance(before, dict) or not isinstance(now, dict):
        return  # Refused where the recipe is validated.
    first, then = phases[number - 1].name, phases[number].name
    for name, table in before.items():
        if name not in now:
            where = place_of((*_KEY, number), str(path), text)
            raise UserError(
                f"{where}: phase {then} has no model.lora.{name}, and begins with the adapters that phase {first} "
                'learned; state it as there, with freeze = ["*.lora_*"] if they are not to learn.'
            )
        was, is_now = _adapter(table), _adapter(now[name])
        if is_now and (other := next((key for key in was if was[key] != is_now.get(key)), "")):
            where = place_of((*_KEY, number, "model", "lora", name), str(path), text)
            key = name if isinstance(table, str) else f"{name}.{other}"
            raise UserError(
                f"{where}: model.lora.{key} of phase {then} is not that of phase {first}, with whose adapters "
                "it begins; make them the same."
            )


def _adapter(table: Any) -> dict[str, Any]:
    """What a table says of adapters but their dropout, with defaults in place (`LoraConfig`)."""
    if isinstance(table, str):
        return {"path": table}  # Of a whole model: the directory says it all.
    from motet.models.lora import LoraConfig  # It imports torch, which takes longer than reading a recipe.

    try:
        config = LoraConfig.model_validate(table)
    except ValidationError:
        return {}  # Refused where the recipe is validated.
    targets = config.targets if isinstance(config.targets, str) else sorted(config.targets)
    return config.model_dump(exclude={"dropout"}) | {"alpha": config.full_alpha, "targets": targets}


def key_in_phase(key: KeyPath, number: int) -> KeyPath:
    """Where a phase has a key of the recipe, if it has it."""
    return (*_KEY, number, *(key[1:] if key[:1] == ("run",) else key))
