"""Fields of records and turns: what is read, what is refused, and what is metadata."""

import pytest

from motet.core.errors import UserError
from motet.data.conversation import media_names, parse_conversation
from unit.data.samples import a_record

HUMAN, GPT = {"from": "human", "value": "Hello"}, {"from": "gpt", "value": "A cat."}


def roles_and_texts(record) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in parse_conversation(record, "here").turns]


def complaint(record) -> str:
    with pytest.raises(UserError) as caught:
        parse_conversation(record, "here")
    assert str(caught.value).startswith("here: ") and "\n" not in str(caught.value)
    return str(caught.value).removeprefix("here: ")


def test_a_system_field_is_the_first_turn():
    record = a_record(system="Be brief about <image>.")
    assert roles_and_texts(record) == [
        ("system", "Be brief about <image>."),
        ("user", "Hello"),
        ("assistant", "A cat."),
    ]
    assert parse_conversation(record, "here").placeholders == ("image",)
    assert roles_and_texts(a_record(system="")) == roles_and_texts(a_record(system=None)) == roles_and_texts(a_record())
    assert complaint(a_record(system=3)) == "'system' is the number 3, but must be text"
    both = {"conversations": [{"from": "system", "value": "x"}, HUMAN, GPT], "system": "y"}
    assert complaint(both) == "has both a field 'system' and a turn from 'system'; give one of them"


def test_messages_say_the_same_as_conversations():
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "A cat.", "name": None}]
    assert roles_and_texts({"messages": messages}) == roles_and_texts(a_record())
    assert roles_and_texts({"conversations": messages}) == roles_and_texts(a_record())
    assert complaint({"messages": messages, "conversations": messages}) == (
        "has both 'conversations' and 'messages'; give one of them"
    )
    parts = [{"type": "text", "text": "Hello"}]
    assert complaint({"conversations": [{"from": "human", "value": parts}, GPT]}) == (
        "turn 1: 'value' is a list, but must be text; write the text with <image>, <audio> and <video> in it"
    )
    assert complaint({"messages": [{"role": "user"}]}) == (
        "turn 1: has no field 'content'; a turn must have 'role' and 'content'"
    )


def learned(*flags: dict) -> list[bool]:
    turns = [turn for flag in flags for turn in (HUMAN, GPT | flag)]
    return [turn.has_loss for turn in parse_conversation({"conversations": turns}, "here").turns if turn.role != "user"]


def test_turns_are_left_out_of_the_loss():
    assert learned({}, {}) == [True, True]
    assert learned({"loss": False}, {"loss": True}) == [False, True]
    assert learned({"train": False}, {}) == [False, True]
    assert learned({"weight": 0}, {"weight": 1.0}) == [False, True]
    assert learned({"loss": None}, {"weight": 0.0}) == [True, False]
    # As in SlimOrca: the other turns say that they have no weight, either.
    parse_conversation({"conversations": [HUMAN | {"weight": 0.0}, GPT | {"weight": 1.0}]}, "here")


def test_the_last_answer_is_the_last_that_is_learned():
    turns = [HUMAN, GPT, HUMAN | {"value": "More?"}, GPT | {"loss": False}]
    before, answer = parse_conversation({"conversations": turns}, "here").without_last_answer()
    assert (len(before.turns), answer) == (1, "A cat.")


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ([HUMAN, GPT | {"loss": False}], "has no answer to learn; all its answers are out of the loss"),
        ([HUMAN, GPT | {"loss": 1}], "turn 2: 'loss' is the number 1, but must be true or false"),
        ([HUMAN, GPT | {"weight": 0.5}], "turn 2: 'weight' is the number 0.5, but must be 0 or 1"),
        ([HUMAN, GPT | {"weight": True}], "turn 2: 'weight' is true, but must be 0 or 1"),
        ([HUMAN, GPT | {"loss": True, "weight": 1}], "turn 2: has both 'loss' and 'weight'"),
        ([HUMAN | {"loss": True}, GPT], "turn 1: 'loss' is true, but loss is taken on the assistant's turns alone"),
        ([HUMAN, GPT | {"train_detail": [1]}], "turn 2: has a field 'train_detail', which is not understood"),
        ([HUMAN, GPT | {"tool_calls": [{}]}], "turn 2: call 1: has no name; a call is an object with 'name' and"),
        ([HUMAN, GPT | {"reasoning_content": "Hm"}], "turn 2: has a field 'reasoning_content', which is not"),
        ([HUMAN | {"role": "user"}, GPT], "turn 1: has a field 'role', which is not understood"),
        ([HUMAN, {"from": "function_call", "value": "f()"}], "turn 2: 'value'"),
        ([HUMAN, {"role": "tool", "content": "3"}], "has no answer to learn; at least one turn must be from 'gpt'"),
        ([HUMAN, {"from": "function", "value": "3"}, GPT], "turn 2: 'from' is 'function', but must be one of human"),
    ],
)
def test_turns_that_are_not_understood(turns, said):
    assert complaint({"conversations": turns}).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "</Video> What?",
            "holds '</Video>', but it stands for no file; media are written <image>, <audio> and <video>",
        ),
        ("<image> and <image_1>", "holds '<image_1>', but it stands for no file"),
        ("<Image>", "holds '<Image>', but it stands for no file"),
        ("<img> What?", "holds '<img>', but it stands for no file"),
        ("<|audio|>", "holds '<|audio|>', but it stands for no file"),
        ("< image 2 >", "holds '< image 2 >', but it stands for no file"),
    ],
)
def test_placeholders_of_others_are_refused_in_every_turn(text, said):
    assert complaint(a_record(text)).startswith(f"turn 1: {said}")
    assert complaint(a_record(answer=text)).startswith(f"turn 2: {said}")
    assert complaint(a_record(system=text)).startswith(f"'system': {said}")


def test_texts_that_only_look_alike():
    for text in ('<video src="a.mp4">', "an <imager>", "images", "a < image", "<b>"):
        parse_conversation(a_record(text), "here")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("functions", [{"name": "f"}], "has a field 'functions': tools are named 'tools', and calls are turns; remove"),
        ("rejected_response", "No.", "has a field 'rejected_response': answers are learned, not compared"),
        ("chosen", "Yes.", "has a field 'chosen': answers are learned, not compared"),
        ("label", False, "has a field 'label': answers are learned, not compared"),
        ("weight", 0.5, "has a field 'weight': what is learned is said in the turns"),
        ("loss", False, "has a field 'loss': what is learned is said in the turns"),
        ("objects", {"bbox": []}, "has a field 'objects': boxes are not written"),
        ("chat_template_kwargs", {"a": 1}, "has a field 'chat_template_kwargs': the chat template is given"),
        ("system_prompt", "x", "has a field 'system_prompt': a system prompt is named 'system'"),
        ("input_ids", [1], "has a field 'input_ids': records hold text, not tokens"),
        ("sytem", "x", "has a field 'sytem': is it meant to be 'system'? Rename or remove it"),
        ("Images", "a.png", "has a field 'Images': is it meant to be 'images'? Rename or remove it"),
        ("image_path", "a.png", "has a field 'image_path', but no <image>, <audio> or <video> in its text; name"),
        ("file_name", "a.png", "has a field 'file_name', but no <image>, <audio> or <video> in its text; name"),
        ("audio_filepath", "a.flac", "has a field 'audio_filepath', but no <image>, <audio> or <video> in its text"),
        ("media", [{"type": "image", "path": "a.png"}], "has a field 'media', but no <image>"),
        ("page", {"bytes": "data:;base64,AAAA", "path": None}, "has a field 'page', but no <image>"),
        ("pages", [{"bytes": None, "path": "a"}], "has a field 'pages', but no <image>"),
        ("jpg", "data:;base64,/9j/4AAQ", "has a field 'jpg', but no <image>"),
        ("said", "data:audio/wav;base64,AAAA", "has a field 'said', but no <image>"),
        ("media", ["a.mp4", "b"], "has a field 'media', but no <image>, <audio> or <video> in its text; name"),
    ],
)
def test_fields_that_would_change_what_is_learned(field, value, said):
    assert complaint(a_record(**{field: value})).startswith(said)
    for nothing in (None, "", [], {}):
        parse_conversation(a_record(**{field: nothing}), "here")


@pytest.mark.parametrize("field", ["start", "end_time", "audio_start", "offset"])
def test_a_part_of_a_clip_is_refused(field):
    clip = {"audio": "a.wav", field: 1.5}
    said = f"has a field '{field}', but a clip is read from its begin to its end; cut the file"
    assert complaint(a_record("<audio>", **clip)).startswith(said)
    for nothing in (None, 0, 0.0):
        parse_conversation(a_record("<audio>", **clip | {field: nothing}), "here")
    parse_conversation(a_record(**{field: 1.5}), "here")


def test_empty_fields_of_media_are_as_good_as_absent():
    record = a_record("<image>", image=[], images=["a.png"], audio="", audios=None)
    assert media_names(record, "here") == {"image": ["a.png"], "audio": None, "video": None}


def test_empty_turns_of_another_kind_are_as_good_as_absent():
    # As a table has them in which records of several kinds were joined.
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    told = [turn.text for turn in parse_conversation({"conversations": [], "messages": messages}, "here").turns]
    assert told == ["Hi", "Yes."]
    asked = {"messages": [], "instruction": "Hi", "output": "Yes."}
    assert [turn.text for turn in parse_conversation(asked, "here").turns] == told
    assert parse_conversation({"messages": [], "text": "A document."}, "here").is_document
    assert complaint({"messages": [], "caption": "A cat."}).startswith("'messages' is an empty list")


def test_empty_fields_of_a_turn_are_as_good_as_absent():
    """As a table has them in which some turns call tools."""
    none = {"tool_calls": [], "name": "", "tool_call_id": None}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]
    found = parse_conversation({"messages": [turn | none for turn in turns]}, "here").turns
    assert found == parse_conversation({"messages": turns}, "here").turns
    assert complaint({"messages": [{"role": "user", "content": "Hi", "name": "Bo"}]}).startswith("turn 1: has a field")


def test_no_tools_may_be_the_text_of_an_empty_list():
    assert parse_conversation(a_record(tools="[]"), "here").tools == ()


def test_metadata_is_kept():
    parse_conversation(
        a_record(
            id=3, task="vqa", source="web", model="x", score=0.5, split="train", category="a", language="en",
            image_id=7, width=3, height=4, meta={"a": [1]}, prompt="Hello", prompt_id="x", license="mit",
            conversation_id="8f", file="a.txt", origin="scan.png", url="https://example.org/a.jpg", duration=3.5,
        ),
        "here",
    )  # fmt: skip
    parse_conversation(a_record("<image> What?", image="a.png", image_url="https://example.org/a.png"), "here")
