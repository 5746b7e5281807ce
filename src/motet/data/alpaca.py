"""Records of instructions, as Alpaca and LLaMA-Factory have them, as turns.

    {"instruction": "Add up.", "input": "4 and 3", "output": "7", "history": [["Hi", "Hello"]]}

The question is the instruction, and the input on a line of its own behind it. Pairs of `history` stand before; their
answers are learned as well. Placeholders, media and `system` are those of any conversation.
"""

from __future__ import annotations

from typing import Any

from motet.core.errors import UserError
from motet.data.record_fields import TEXT_FIELD, is_given, kind_of

_INSTRUCTION, _INPUT, _OUTPUT, _HISTORY = "instruction", "input", "output", "history"


def is_instruction(record: dict[str, Any]) -> bool:
    """Whether a record without turns has an instruction and its answer."""
    return is_given(record.get(_INSTRUCTION)) and _OUTPUT in record


def instruction_turns(record: dict[str, Any], where: str) -> list[dict[str, str]]:
    """The turns of such a record. Raises UserError naming `where`, also where `text` would be another reading of it."""
    if is_given(record.get(TEXT_FIELD)):
        raise UserError(
            f"{where}: has both 'text', which would be learned whole, and '{_INSTRUCTION}' with '{_OUTPUT}'; leave out "
            "the one that is not meant"
        )
    given = {name: record.get(name) for name in (_INSTRUCTION, _INPUT, _OUTPUT)}
    for name, value in given.items():
        if not isinstance(value, str) and not (name == _INPUT and value is None):
            raise UserError(f"{where}: '{name}' is {kind_of(value)}, but must be text")
    question = "\n".join(filter(None, (given[_INSTRUCTION], given[_INPUT])))
    return [*_history(record.get(_HISTORY), where), *_pair(question, str(given[_OUTPUT]))]


def _history(pairs: Any, where: str) -> list[dict[str, str]]:
    turns: list[dict[str, str]] = []
    if not isinstance(pairs, list | None):
        raise UserError(f"{where}: '{_HISTORY}' is {kind_of(pairs)}, but must be a list of pairs")
    for number, pair in enumerate(pairs or (), start=1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise UserError(
                f"{where}: '{_HISTORY}' must be pairs of a question and an answer, but number {number} is not"
            )
        turns += _pair(*pair)
    return turns


def _pair(question: str, answer: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
