"""Tools and their calls in records, as chat templates of transformers take them.

A turn of the assistant has `tool_calls` (OpenAI), or stands for calls by its role, `function_call` or `tool_call`, with
the calls as JSON in its text (LLaMA-Factory, ms-swift). `tools` of a record is a list of schemas, or the JSON of it.
"""

from __future__ import annotations

import json
from typing import Any

import motet.core.text_files
from motet.core.errors import UserError
from motet.data.record_fields import kind_of

Call = dict[str, Any]
"""One call: {"type": "function", "function": {"name": ..., "arguments": ...}}, with an `id` perhaps."""


def parse_tools(value: object, where: str) -> tuple[dict[str, Any], ...]:
    """The tools of a record, as the template is given them; none of the text "[]". Raises UserError naming `where`."""
    tools = motet.core.text_files.parse_json(value.encode(), f"{where}: 'tools'") if isinstance(value, str) else value
    if not isinstance(tools, list) or any(not isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: 'tools' is {kind_of(tools)}, but must be a list of JSON schemas, or the JSON of one")
    for number, tool in enumerate(tools, start=1):
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise UserError(f"{where}: tool {number} has no name; a tool is a JSON schema with 'name' in it")
    return tuple(tools)


def parse_calls(value: object, where: str) -> tuple[Call, ...]:
    """The calls of a turn, each in OpenAI's form. Raises UserError naming `where`."""
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise UserError(f"{where}: has no call; leave 'tool_calls' out")
    return tuple(_call(call, f"{where}: call {number}") for number, call in enumerate(calls, start=1))


def calls_in_text(text: str, where: str) -> tuple[Call, ...]:
    """The calls of a turn whose text is their JSON: one call, or a list of them. Raises UserError naming `where`."""
    return parse_calls(motet.core.text_files.parse_json(text.encode(), where), where)


def with_objects(call: Call) -> Call:
    """The call with its arguments as an object. Raises UserError if they are text that is no JSON object."""
    function = call["function"]
    if not isinstance(function["arguments"], str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise UserError(f"the arguments of a call of '{function['name']}' are no JSON object")
    return call | {"function": function | {"arguments": arguments}}


def with_name(call: Call, mark: str) -> Call:
    """A call that says the mark three times: its name, and an argument and its value, in the form of the call's own."""
    arguments: Any = {mark: mark}
    if isinstance(call["function"]["arguments"], str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return call | {"function": {"name": mark, "arguments": arguments}}


def _call(call: object, where: str) -> Call:
    if not isinstance(call, dict):
        raise UserError(f"{where}: is {kind_of(call)}, but must be an object with 'name' and 'arguments'")
    call = {name: value for name, value in call.items() if value is not None}
    function = call.get("function", {name: call[name] for name in call if name not in ("id", "type")})
    around = {name: call[name] for name in call if name in ("id", "type")} if "function" in call else {}
    unknown = call.keys() - {"id", "type", "function"} if "function" in call else set()
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: has no name; a call is an object with 'name' and 'arguments'")
    if unknown := unknown | (function.keys() - {"name", "arguments"}):
        raise UserError(
            f"{where}: has a field '{min(unknown)}', which is not understood; a call has name and arguments"
        )
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str | dict):
        raise UserError(f"{where}: 'arguments' is {kind_of(arguments)}, but must be an object, or the JSON of one")
    return {"type": "function"} | around | {"function": {"name": function["name"], "arguments": arguments}}
