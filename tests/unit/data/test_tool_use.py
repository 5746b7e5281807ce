"""Tools, their calls and their answers: the tokens that transformers makes of the same messages, calls learned."""

import json
import pickle

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from motet.core.errors import UserError
from motet.data.conversation import parse_conversation
from motet.data.index_build import open_index
from motet.data.text import ChatTokenizer
from unit.data.families import CHATML, IM, QWEN2_VL, write_tokenizer

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}SAID<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAID = (
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}{% set f = call.function or call %}"
    "<call>{{ {'name': f.name, 'arguments': f.arguments} | tojson }}</call>{% endfor %}"
)
OBJECTS = TEMPLATE.replace("SAID", SAID)
TEXTS = TEMPLATE.replace(
    "SAID",
    SAID.replace(
        "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}",
        ("{{ f.name }} {{ f.arguments if f.arguments is string else f.arguments | tojson }}"),
    ),
)
MARKED = TEMPLATE.replace(
    "SAID",
    "{% if m.role == 'assistant' %}{% generation %}" + SAID + "{% endgeneration %}{% else %}" + SAID + "{% endif %}",
)
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"default": None}}}}}
]


def call(arguments, name="weather"):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def messages(arguments):
    return [
        {"role": "user", "content": "A cat in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call(arguments), call(arguments)]},
        {"role": "tool", "content": "7 cats", "name": "weather", "tool_call_id": "x"},
        {"role": "assistant", "content": "The answer: seven"},
    ]


def both(folder, template):
    write_tokenizer(folder, template, IM, {"eos_token": "<|im_end|>"})
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>")
    theirs.chat_template = template
    return ChatTokenizer.from_directory(folder), theirs


def encode(tokenizer, record):
    return tokenizer.encode(parse_conversation(record, "line 1"))


@pytest.mark.parametrize("template", [OBJECTS, TEXTS, MARKED])
def test_tokens_and_targets_are_those_of_transformers(tmp_path, template):
    ours, theirs = both(tmp_path, template)
    said = messages({"city": "Paris"})
    sequence = encode(ours, {"messages": said, "tools": TOOLS})
    expected = theirs.apply_chat_template(
        said, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=template is MARKED
    )
    assert sequence.tokens.tolist() == expected["input_ids"]
    if template is MARKED:
        marked = np.array(expected["assistant_masks"], dtype=bool)  # Without the end that stands behind the marks.
        ends = (sequence.tokens == theirs.eos_token_id) & np.append(False, marked[:-1])
        assert sequence.targets.tolist() == (marked | ends).tolist()
        return
    targets = np.zeros(len(sequence.tokens), dtype=bool)
    for turn in (1, 3):
        start = len(theirs.apply_chat_template(said[:turn], tools=TOOLS, add_generation_prompt=True)["input_ids"])
        end = len(theirs.apply_chat_template(said[: turn + 1], tools=TOOLS)["input_ids"])
        targets[start : end - len(theirs("\n")["input_ids"])] = True
    assert sequence.targets.tolist() == targets.tolist()


def test_arguments_as_text_are_what_the_template_writes_as_it_is(tmp_path):
    """OpenAI's arguments are the JSON of an object. A template that writes JSON would quote it once more."""
    (tmp_path / "a").mkdir()
    ours, _ = both(tmp_path / "a", OBJECTS)
    text, plain = messages('{"city": "Paris"}'), messages({"city": "Paris"})
    assert encode(ours, {"messages": text}).tokens.tolist() == encode(ours, {"messages": plain}).tokens.tolist()
    assert '\\"' not in ours.decode(encode(ours, {"messages": text}).tokens)
    ours, theirs = both(tmp_path / "b", TEXTS)
    odd = messages('{"city":   "Paris"}')
    assert encode(ours, {"messages": odd}).tokens.tolist() == theirs.apply_chat_template(odd)["input_ids"]


def test_calls_as_turns_are_calls(tmp_path):
    ours, _ = both(tmp_path, OBJECTS)
    expected = encode(ours, {"messages": messages({"city": "Paris"}), "tools": TOOLS})
    made = json.dumps({"name": "weather", "arguments": {"city": "Paris"}})
    swift = [
        {"role": "user", "content": "A cat in Paris?"},
        {"role": "tool_call", "content": made},
        {"role": "tool_call", "content": made},
        {"role": "tool_response", "content": "7 cats"},
        {"role": "assistant", "content": "The answer: seven"},
    ]
    factory = [
        {"from": "human", "value": "A cat in Paris?"},
        {"from": "function_call", "value": f"[{made}, {made}]"},
        {"from": "observation", "value": "7 cats"},
        {"from": "gpt", "value": "The answer: seven"},
    ]
    for record in ({"messages": swift}, {"conversations": factory}):
        found = encode(ours, record | {"tools": json.dumps(TOOLS)})
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.targets.tolist() == expected.targets.tolist()


def test_a_call_is_no_answer_to_compare_and_may_be_out_of_the_loss(tmp_path):
    ours, _ = both(tmp_path, OBJECTS)
    said = messages({"city": "Paris"})
    assert parse_conversation({"messages": said}, "line 1").has_answer
    assert not parse_conversation({"messages": said[:2]}, "line 1").has_answer
    said[1]["loss"] = False
    learned = encode(ours, {"messages": said})
    assert ours.decode(learned.tokens[learned.targets]) == "The answer: seven"
    prompt, answer = ours.encode_prompt(parse_conversation({"messages": said, "tools": TOOLS}, "line 1"))
    assert answer == "The answer: seven" and "7 cats" in ours.decode(prompt.tokens)


def test_calls_are_learned_where_the_last_answer_alone_has_a_thought(tmp_path):
    """As Qwen3's template has it."""
    thought = "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    ours, _ = both(tmp_path, OBJECTS.replace(SAID, thought + SAID))
    said = {"messages": messages({"city": "Paris"}), "tools": TOOLS}
    learned = encode(ours, said)
    made = "<call>" + json.dumps({"name": "weather", "arguments": {"city": "Paris"}}) + "</call>"
    assert ours.decode(learned.tokens[learned.targets], special=True) == (
        f"{made}{made}<|im_end|><think></think>The answer: seven<|im_end|>"
    )
    # What a tool answers is no part of a turn that goes on behind it.
    end = "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>{% endif %}"
    ours, _ = both(tmp_path, OBJECTS.replace(f"{SAID}<|im_end|>", f"{thought}{SAID}{end}"))
    with pytest.raises(UserError, match="writes an answer in another way when more follows"):
        encode(ours, said)


USER = {"role": "user", "content": "A cat?"}


@pytest.mark.parametrize(
    ("template", "record", "said"),
    [
        (QWEN2_VL, {"messages": messages({})}, "leaves out a call of 'weather', or its arguments"),
        (QWEN2_VL, {"messages": [USER, messages({})[3]], "tools": TOOLS}, "leaves out tools"),
        (OBJECTS, {"messages": messages("no JSON")}, "the arguments of a call of 'weather' are no JSON object"),
        (OBJECTS, {"messages": messages(3)}, "call 1: 'arguments' is the number 3, but must be an object, or the JSON"),
        (OBJECTS, {"messages": messages({"a": "<|im_end|>"})}, "a tool or a call holds '<|im_end|>'"),
        (OBJECTS, {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "call 1: has no name"),
        (
            OBJECTS,
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "args": {}}]}]},
            "call 1: has a field 'args', which is not understood",
        ),
        (
            OBJECTS,
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": "Hi"},
                    {"role": "tool_call", "content": '{"name": "f"}'},
                ]
            },
            "turn 3 is a call right behind an answer; write both as one turn",
        ),
        (OBJECTS, {"messages": [USER, {"role": "function_call", "content": "f()"}]}, "turn 2: 'content'"),
        (OBJECTS, {"messages": [USER | {"tool_calls": [{"name": "f"}]}]}, "has a field 'tool_calls', which is not und"),
        (OBJECTS, {"messages": [USER, messages({})[3]], "tools": [{"type": "x"}]}, "tool 1 has no name"),
        (OBJECTS, {"messages": [USER, messages({})[3]], "tools": "abc"}, "'tools'"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, template, record, said):
    ours, _ = both(tmp_path, template)
    with pytest.raises(UserError) as caught:
        encode(ours, record)
    assert said in str(caught.value)


def test_calls_of_a_table_have_no_arguments_of_other_rows(tmp_path):
    """Parquet gives each object the keys of all."""
    ours, _ = both(tmp_path, OBJECTS)
    records = [{"messages": messages(arguments)} for arguments in ({"city": "Paris"}, {"days": 3})]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    index = open_index(tmp_path / "a.parquet", ours)
    for number, record in enumerate(records):
        assert index.tokens(number).tokens.tolist() == encode(ours, record).tokens.tolist()


def test_nulls_of_calls_and_tools_are_kept_in_a_list_of_records(tmp_path):
    """A null of JSON is said; in a table it stands for what a row does not have."""
    ours, _ = both(tmp_path, OBJECTS)
    record = {"messages": messages({"city": None, "days": 3}), "tools": TOOLS}
    (tmp_path / "a.json").write_text(json.dumps([record]))
    assert open_index(tmp_path / "a.json", ours).tokens(0).tokens.tolist() == encode(ours, record).tokens.tolist()


@pytest.mark.parametrize("saved", ["by transformers", "in one file"])
def test_a_template_for_conversations_with_tools_is_taken_as_transformers_takes_it(tmp_path, saved):
    transformers = pytest.importorskip("transformers")
    plain = CHATML.replace("MEDIA", "")
    with_tools = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}" + plain
    folder = write_tokenizer(tmp_path / "tok", plain, IM, {"eos_token": "<|im_end|>"})
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": with_tools}]
    if saved == "in one file":
        (folder / "chat_template.jinja").unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    else:
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        theirs.chat_template = {each["name"]: each["template"] for each in named}
        theirs.save_pretrained(folder)
        assert (folder / "additional_chat_templates" / "tool_use.jinja").is_file()
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), ChatTokenizer.from_directory(folder)
    messages = [{"role": "user", "content": "What time?"}, {"role": "assistant", "content": "Noon."}]
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
    for tools in ([], [tool]):
        record = {"messages": messages, "tools": tools}
        expected = theirs.apply_chat_template(messages, tools=tools or None, return_dict=True)["input_ids"]
        for tokenizer in (ours, pickle.loads(pickle.dumps(ours))):
            sequence = tokenizer.encode(parse_conversation(record, "here"))
            assert sequence.tokens.tolist() == expected
            assert tokenizer.decode(sequence.tokens[sequence.targets], special=True) == "Noon.<|im_end|>"
        prompt = ours.encode_prompt(parse_conversation(record, "here"))[0].tokens.tolist()
        asked = theirs.apply_chat_template(
            messages[:1], tools=tools or None, add_generation_prompt=True, return_dict=True
        )
        assert prompt == asked["input_ids"]
    alone = write_tokenizer(tmp_path / "one", plain, IM, {"eos_token": "<|im_end|>"})
    assert ours.fingerprint != ChatTokenizer.from_directory(alone).fingerprint
