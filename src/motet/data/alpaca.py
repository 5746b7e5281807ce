"""Records of a question and its answer without turns, as Alpaca, LLaMA-Factory and ms-swift have them, as turns.

    {"instruction": "Add up.", "input": "4 and 3", "output": "7", "history": [["Hi", "Hello"]]}
    {"query": "Add up 4 and 3.", "response": "7", "history": [["Hi", "Hello"]]}

The question of the former is the instruction, and the input on a line of its own behind it. Pairs of `history` stand
before; their answers are learned as well. Placeholders, media and `system` are those of any conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from motet.core.errors import UserError
from motet.data.record_fields import TEXT_FIELD, is_given, kind_of

_INPUT, _HISTORY = "input", "history"
_STYLES = (("instruction", "output"), ("query", "response"))
"""Names of the question and of the answer. Only the former kind has an input."""


def is_instruction(record: dict[str, Any]) -> bool:
    """Whether a record without turns has a question and its answer."""
    return any(is_given(record.get(question)) and answer in record for question, answer in _STYLES)


def instruction_turns(record: dict[str, Any], where: str) -> list[dict[str, str]]:
    """The turns of such a record. Raises UserError naming `where`, also where `text` would be another reading of it."""
    question, answer = next(style for style in _STYLES if is_given(record.get(style[0])) and style[1] in record)
    others = {TEXT_FIELD: ", which would be learned whole,"} | {
        style[0]: "" for style in _STYLES if style[0] != question
    }
    others |= {} if question == _STYLES[0][0] else {_INPUT: ""}
    for name, what in others.items():
        if is_given(record.get(name)):
            raise UserError(
                f"{where}: has both '{name}'{what} and '{question}' with '{answer}'; leave out the one that is not "
                "meant"
            )
    fields = (question, _INPUT, answer) if question == _STYLES[0][0] else (question, answer)
    given = {name: record.get(name) for name in fields}
    for name, value in given.items():
        if not isinstance(value, str) and not (name == _INPUT and value is None):
            raise UserError(f"{where}: '{name}' is {kind_of(value)}, but must be text")
    asked = "\n".join(filter(None, (given[question], given.get(_INPUT))))
    return [*_history(record.get(_HISTORY), where), *_pair(asked, str(given[answer]))]


def check_beside_turns(record: dict[str, Any], turns: Sequence[str], where: str, field: str) -> None:
    """Raise UserError if a record with turns has others beside them, which would be left out.

    turns: their texts. field: that holds them. A question and its answer that stand among the turns are no others.
    """
    for question, answer in _STYLES:
        texts = [record.get(question), record.get(answer)]
        said = [text for text in texts if isinstance(text, str) and text.strip()]
        if len(said) == 2 and not all(any(text.strip() in turn for turn in turns) for text in said):
            raise UserError(
                f"{where}: has both '{field}' and '{question}' with '{answer}', which are not among its turns; leave "
                "out the one that is not meant"
            )
    if isinstance(pairs := record.get(_HISTORY), list) and any(isinstance(pair, list | dict) for pair in pairs):
        raise UserError(
            f"{where}: has both '{field}' and '{_HISTORY}', which would be left out; write it as the first turns, "
            "or remove it"
        )


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
