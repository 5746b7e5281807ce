"""A Program as text that people read, compare and edit:

    microbatches 2
    stage 0 rank 0 "image" group 3
    stage 1 rank 1 "backbone" group 4 microbatches 0,1 meets
    edge 0>1
    rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1
    rank 1: 1RECV_F0<0 1F0 1B0 1RECV_F1<0 1F1 1B1

A module is a JSON string. `group`, `microbatches` and `meets` are optional: a stage without them has no group, takes
all microbatches, or runs its passes by itself. Blank lines mean nothing.
"""

from __future__ import annotations

import json
import re

from motet.core.errors import UserError
from motet.core.text_files import parse_json
from motet.schedule.program import Action, Kind, Program, Stage, grid

_ACTION = re.compile(r"(\d+)([A-Z_]+)(\d+)?(?:\.(\d+))?(?:([<>])(\d+))?", re.ASCII)
_STAGE = re.compile(r'stage (\d+) rank (\d+) (".*")(?: group (\d+))?(?: microbatches ([\d,]+))?( meets)?', re.ASCII)
_RANK = re.compile(r"rank +(\d+):(.*)", re.ASCII)


def dumps(program: Program) -> str:
    """The text of a Program. `loads` reads an equal Program from it."""
    lines = [f"microbatches {program.num_microbatches}"]
    for number, stage in enumerate(program.stages):
        group = f" group {stage.group}" if stage.group >= 0 else ""
        taken = f" microbatches {','.join(map(str, stage.microbatches))}" if stage.microbatches else ""
        meets = " meets" if stage.meets else ""
        lines.append(f"stage {number} rank {stage.rank} {json.dumps(stage.module)}{group}{taken}{meets}")
    lines += [f"edge {source}>{sink}" for source, sink in program.edges]
    if program.actions:
        lines.append(grid(program.actions))
    return "\n".join(lines) + "\n"


def loads(text: str) -> Program:
    """The Program of a text. Only its form is checked; `validate` proves the rest.

    Raises UserError, which names the line, for a text of another form.
    """
    reader = _Reader()
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                reader.read(line.strip())
            except UserError as error:
                raise UserError(f"Line {number} of the Program: {error}") from None
            except ValueError:
                # Python refuses to read a number of thousands of digits.
                raise UserError(f"Line {number} of the Program: has a number that is too long.") from None
    if reader.num_microbatches < 0:
        raise UserError('The Program does not say how many microbatches it has; a line "microbatches 8" does.')
    return Program(tuple(reader.stages), tuple(reader.edges), tuple(reader.actions), reader.num_microbatches)


def parse_action(text: str) -> Action:
    """The action that prints as `text`. Raises UserError for what no action prints as."""
    match = _ACTION.fullmatch(text)
    if not match or match[2] not in Kind.__members__:
        raise UserError(f'"{text}" is no action; one is as "2F0": a stage, one of {", ".join(Kind)}, a microbatch.')
    stage, kind, *numbers = match.group(1, 2, 3, 4, 6)
    action = Action(int(stage), Kind[kind], *(-1 if number is None else int(number) for number in numbers))
    if str(action) != text:
        raise UserError(f'"{text}" must be written "{action}".')
    return action


class _Reader:
    """The Program as far as its lines have been read."""

    def __init__(self) -> None:
        self.num_microbatches = -1
        self.stages: list[Stage] = []
        self.edges: list[tuple[int, int]] = []
        self.actions: list[tuple[Action, ...]] = []

    def read(self, line: str) -> None:
        """Take in one line. Raises UserError for a line of another form."""
        if match := re.fullmatch(r"microbatches (\d+)", line, re.ASCII):
            if self.num_microbatches >= 0:
                raise UserError("the number of microbatches stands here a second time; it must stand once.")
            self.num_microbatches = int(match[1])
        elif match := _STAGE.fullmatch(line):
            self._expect("stage", match[1], len(self.stages))
            taken = tuple(int(number) for number in (match[5] or "").split(",") if number)
            group = int(match[4]) if match[4] else -1
            self.stages.append(Stage(int(match[2]), _module(match[3]), group, taken, bool(match[6])))
        elif match := re.fullmatch(r"edge (\d+)>(\d+)", line, re.ASCII):
            self.edges.append((int(match[1]), int(match[2])))
        elif match := _RANK.fullmatch(line):
            self._expect("rank", match[1], len(self.actions))
            self.actions.append(tuple(map(parse_action, match[2].split())))
        else:
            raise UserError(
                f'"{line}" is not understood; a line is as "microbatches 8", \'stage 0 rank 0 "image"\', "edge 0>1" or '
                '"rank 0: 0F0 0B0".'
            )

    def _expect(self, noun: str, number: str, expected: int) -> None:
        if int(number) != expected:
            raise UserError(f"{noun} {number} stands where {noun} {expected} must; they are numbered in order from 0.")


def _module(text: str) -> str:
    try:
        module = parse_json(text.encode(), "the module")
    except UserError:
        module = None
    if not isinstance(module, str):
        raise UserError(f'{text} is no JSON string; a module is written as "image".')
    return module
