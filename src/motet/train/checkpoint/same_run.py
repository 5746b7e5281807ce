"""Whether a run may go on from a checkpoint: all that a recipe must not change in between, in one place.

A checkpoint has weights, the optimizer's state and a position among the examples. So the examples and their order must
be the same, and what is made of them: what the model is given, what it computes of that, and what it is to learn.
Shapes and dtypes are compared where tensors are read (`storage.py`). All else may change: rates and other options of
the optimizer, the weight of a loss, dropout, what learns of what learned, ranks, Plans, sharding and precision. What
another text of a file of the user's own changes is not known, so that it is said and not refused (`changed_files`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from motet.core.errors import UserError
from motet.core.own_file import file_named
from motet.core.text_files import read_json
from motet.train.checkpoint.choice import Start
from motet.train.checkpoint.contents import Progress, RunState
from motet.train.recipe.recipe import Recipe

_ANEW = ", or start anew with --resume never"
_OTHERWISE = (
    ", so the model would go on to learn something else: set it back, begin with its weights alone by run.start" + _ANEW
)
_MAY_CHANGE = re.compile(
    r"path|train(_encoder|_projector|_generator)?|lora|freeze|sampling|weight|drop_condition|encode_in|draft_jpeg|"
    # Of the files of directories.
    r".*(dropout|pdrop|layerdrop)|drop_path_rate|init.*_(range|std|factor)|_.*|.*_(version|hash|class)|"
    r"image_processor_type|feature_extractor_type|(torch_)?dtype|architectures|auto_map|use_cache|id2label|label2id|"
    r"output_(hidden_states|attentions)|return_dict|(bos|eos|pad)_token_id"
)
"""Keys, or parts of them, that may change."""
_NAMED_IN_FILE = ("module", "before", "between", "after", "merge")
_FILES = (
    *("config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
    *("scheduler/scheduler_config.json", "transformer/config.json", "unet/config.json", "vae/config.json"),
)
"""What a directory says of a model, of what it is given and of what it learns."""
_MOST_SHOWN = 60


def stated(recipe: Recipe) -> dict[str, str]:
    """What a recipe, and the directories that it names, say of inputs, model and targets: by key, as JSON.

    What is as by default is left out. Raises UserError for a file that is no JSON.
    """
    tables = recipe.model_dump(mode="json", include={"model", "transforms"}, exclude_defaults=True)
    paths = [(key, Path(value)) for key, value in table_leaves(tables) if key.endswith(".path") and ".lora." not in key]
    said = dict(_kept(tables))
    for key, folder in paths:
        for file in _FILES:
            if (folder / file).is_file():
                said |= {
                    f"{inner} in {key}/{file}": value for inner, value in _kept(read_json(folder / file, infinite=True))
                }
    return {key: json.dumps(value, sort_keys=True) for key, value in said.items()}


def own_files(recipe: Recipe) -> dict[str, str]:
    """Key of a recipe that names code of the user's own -> the file, and behind a blank a digest of its text."""
    tables = recipe.model_dump(mode="json", include={"model", "modalities"}, exclude_defaults=True)
    found: dict[str, str] = {}
    for key, value in table_leaves(tables):
        table, _, last = key.rpartition(".")
        file: Path | None = None
        if isinstance(value, str) and last in _NAMED_IN_FILE:
            file = file_named(value)
        elif isinstance(value, str) and last == "file" and table.startswith("modalities."):
            file = Path(value)
        if file is not None:
            found[key] = f"{file} {hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()}"
    return found


def changed_files(then: RunState, now: Mapping[str, str]) -> str:
    """The sentence on files of the user's own whose text is another than that of a checkpoint; "" if there is none.

    now: as of `own_files`.
    """
    before = then.own_files or {}
    others = [key for key in now if key in before and _digest(before[key]) != _digest(now[key])]
    if not others:
        return ""
    named = ", ".join(f"{now[key].rpartition(' ')[0]} ({key})" for key in others)
    return (
        f"Since the checkpoint was written the text of {named} has changed: what the model is given or computes may be "
        "another from here on."
    )


def _digest(file: str) -> str:
    return file.rpartition(" ")[2]


def check_same_run(chosen: Start, start: Progress, num_steps: int) -> None:
    """Raise UserError if a checkpoint has other examples, another order of them or learns otherwise, or is too far."""
    then, where = chosen.state, f"The checkpoint {chosen.path}"
    if then.seed != start.seed:
        raise UserError(
            f"{where} was written with data.seed = {then.seed}, not {start.seed} as now, which orders the examples "
            f"anew: set it back{_ANEW}."
        )
    if then.shuffle not in (None, start.shuffle):
        was, now = (str(shuffle).lower() for shuffle in (then.shuffle, start.shuffle))
        raise UserError(
            f"{where} was written with data.shuffle = {was}, not {now} as now, which orders the examples anew: set it "
            f"back{_ANEW}."
        )
    if then.optimizer not in ("", start.optimizer):
        raise UserError(
            f'{where} has the state of optimizer.name = "{then.optimizer}", not of "{start.optimizer}" as now: set it '
            "back, or begin with its weights alone by run.start."
        )
    if then.mixture != start.mixture:
        was, now = (str(list(mixture) or "no mixture") for mixture in (then.mixture, start.mixture))
        raise UserError(
            f"{where} was written with a data.mixture in the proportion {was}, not {now} as now, which orders the "
            f"examples anew: set it back{_ANEW}."
        )
    if then.dataset != start.dataset:
        raise UserError(
            f"{where} was written on other training examples (records of data.train, their tokens, or [workload]) than "
            "those of this run, so its position among them means nothing: restore them, give this run a run.dir of its "
            f"own{_ANEW}."
        )
    check_beside(chosen.path, then, start, _ANEW)
    if then.group != start.group:
        raise UserError(
            f"{where} was written {_group_words(then.group)}, and this run is {_group_words(start.group)}, which "
            f"orders the examples anew: set it back{_ANEW}."
        )
    if start.stated is not None:
        check_stated(chosen.path, then, start.stated, or_else=_OTHERWISE)
    if then.step > num_steps:
        raise UserError(
            f"{where} is of step {then.step}, and run.steps = {num_steps} ends before it: raise run.steps, go back to "
            f"an earlier checkpoint with --resume PATH{_ANEW}."
        )


def check_beside(checkpoint: Path, then: RunState, now: Progress, or_else: str = "") -> None:
    """Raise UserError if a checkpoint has adapters of a part whose frozen weights, or whose scale, are others now.

    or_else: what may be done about it but to restore them.
    """
    if other := _first_other(then.beside or {}, now.beside or {}):
        raise UserError(
            f"The checkpoint {checkpoint} has adapters of {other!r} alone, and was written beside other weights than "
            f"those of its path in [model] now, or of run.seed: restore them{or_else}."
        )
    scales, stated_now = then.scales or {}, now.scales or {}
    if other := _first_other(scales, stated_now):
        raise UserError(
            f"The checkpoint {checkpoint} has adapters of {other!r} that are multiplied by {scales[other]:g}, and "
            f"alpha, rank and rank_stabilized of model.lora say {stated_now[other]:g} now: restore them{or_else}."
        )


def check_stated(checkpoint: Path, then: RunState, now: Mapping[str, str], table: str = "", or_else: str = "") -> None:
    """Raise UserError if a recipe says otherwise than that of a checkpoint what is computed or learned.

    now: as of `stated`. table: of which keys alone count, all by default. or_else: the rest of the sentence.
    """
    before = now if then.stated is None else then.stated
    for key in (key for key in (*before, *now) if key.startswith(table)):
        if before.get(key) != now.get(key):
            was, is_now = (_shown(said.get(key)) for said in (before, now))
            raise UserError(f"The checkpoint {checkpoint} was written with {key} {was}, not {is_now} as now{or_else}.")


def _shown(value: str | None) -> str:
    if value is None:
        return "as by default"
    return f"= {value}" if len(value) <= _MOST_SHOWN else f"= {value[:_MOST_SHOWN]} ..."


def _kept(tables: Any) -> Iterator[tuple[str, Any]]:
    """The leaves that must not change. A null is none: files have or lack it as the version goes that wrote them."""
    for key, value in table_leaves(tables):
        parts = key.split(".")
        if value is not None and not any(_MAY_CHANGE.fullmatch(part) for part in parts):
            # A file of the user's own may lie elsewhere.
            yield key, Path(value).name if parts[-1] in _NAMED_IN_FILE and isinstance(value, str) else value


def table_leaves(tables: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested tables; a list is a value."""
    if not isinstance(tables, dict):
        yield key, tables
        return
    for name, value in tables.items():
        yield from table_leaves(value, f"{key}.{name}" if key else str(name))


def _first_other(then: Mapping[str, object], now: Mapping[str, object]) -> str:
    """The first part of both whose value is another now; "" if there is none."""
    return next((name for name in then if name in now and then[name] != now[name]), "")


def _group_words(group: Mapping[str, int] | None) -> str:
    if group is None:
        return "without data.group"
    return "with data.group = { " + ", ".join(f"{name} = {cap}" for name, cap in group.items()) + " }"
