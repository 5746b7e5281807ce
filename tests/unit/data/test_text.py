import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from motet.core.errors import UserError
from motet.data.conversation import parse_conversation
from motet.data.text import ChatTokenizer
from unit.data.samples import SPECIAL, TEMPLATE, a_record

CHATML = (
    "{% for message in messages %}{{ '<user>' + message.role + '\n' + message.content|trim + '<eos>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<user>assistant\n' }}{% endif %}"
)
TWO_ROUNDS = parse_conversation(
    {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "What is <image> and <audio>?"},
            {"from": "gpt", "value": "A cat."},
            {"from": "human", "value": "And <image>?"},
            {"from": "gpt", "value": "Ünïcode € dog"},
        ]
    },
    "here",
)


def pieces(tokenizer: ChatTokenizer, ids) -> list[str]:
    return [tokenizer.backend.token(token) for token in ids]


def target_texts(tokenizer: ChatTokenizer, conversation=TWO_ROUNDS) -> list[str]:
    """The runs of targets, special tokens written out."""
    sequence = tokenizer.encode(conversation)
    edges = np.flatnonzero(np.diff(sequence.targets.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [tokenizer.decode(sequence.tokens[a:b], special=True) for a, b in edges]


def test_answers_and_their_end_tokens_are_targets(tokenizer):
    assert target_texts(tokenizer) == ["A cat.<eos>", "Ünïcode € dog<eos>"]


def test_a_template_without_generation_marks(backend):
    tokenizer = ChatTokenizer(backend, CHATML, {"eos_token": "<eos>"})
    assert target_texts(tokenizer) == ["A cat.<eos>", "Ünïcode € dog<eos>"]
    stripped = parse_conversation(a_record(answer="  A cat. \n"), "here")
    assert target_texts(tokenizer, stripped) == ["A cat.<eos>"]


def test_tokens_that_end_an_answer(backend):
    """Gemma's template ends turns by another token than the tokenizer's eos_token, and some by one of the next turn."""

    def ends(template):
        found = ChatTokenizer(backend, template, {"eos_token": "<eos>"})
        return sorted(pieces(found, found.end_tokens))

    assert ends(TEMPLATE) == ends(CHATML) == ends(None) == ["<eos>"]
    assert ends(CHATML.replace("<eos>", "<pad>")) == ["<eos>", "<pad>"]
    marked = CHATML.replace(
        "{{ '<user>' + message.role + '\n' + message.content|trim + '<eos>' + '\n' }}", "{{ TURN }}"
    )
    inside = marked.replace("{{ TURN }}", "<user>{% generation %}{{ message.content }}<pad>\n{% endgeneration %}")
    assert ends(inside) == ["<eos>", "<pad>"]
    assert ends(marked.replace("{{ TURN }}", "<user>{{ message.content }}")) == ["<eos>", "<user>"]
    assert ends(marked.replace("{{ TURN }}", "Q: {% generation %}{{ message.content }}{% endgeneration %}")) == [
        "<eos>"
    ]
    assert ends("{{ raise_exception('no') }}") == ["<eos>"]


def test_whether_an_end_is_learned_behind_the_last_answer(backend):
    def ends_answers(template):
        return ChatTokenizer(backend, template, {"eos_token": "<eos>"}).ends_answers

    assert ends_answers(None)
    assert ends_answers("{{ raise_exception('no') }}"), "unknown"
    # As in llava-hf's template, and as in GLM's, where the next turn begins by the token that ends this one.
    assert not ends_answers("{% for m in messages %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}")
    assert not ends_answers("{% for m in messages %}{{ '<user>' + m.content }}{% endfor %}")


def test_the_default_template(backend):
    tokenizer = ChatTokenizer(backend, None, {"eos_token": "<eos>"})
    assert target_texts(tokenizer) == ["A cat.<eos>", "Ünïcode € dog<eos>"]
    prompt, answer = tokenizer.encode_prompt(parse_conversation(a_record("Hello", "Hi"), "here"))
    assert tokenizer.decode(prompt.tokens) == "USER:\nHello\nASSISTANT:\n"
    assert answer == "Hi"


def test_tokens_that_merge_across_the_boundary_of_an_answer():
    # No pre-tokenizer: "a." and ".\n" may become one token over the answer's edges.
    from tokenizers import trainers

    raw = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<eos>"], show_progress=False)
    raw.train_from_iterator(["Q:x A:yes.\n"] * 50, trainer)
    template = (
        "{% for m in messages %}{{ 'Q:' if m.role == 'user' else ' A:' }}{{ m.content }}"
        "{{ '\n' if m.role != 'user' }}{% endfor %}"
    )
    tokenizer = ChatTokenizer(raw.to_str(), template, {})
    sequence = tokenizer.encode(parse_conversation(a_record("x", "yes."), "here"))
    # The whole text is one token, which holds the answer: it is a target, not lost.
    assert sequence.targets.any()
    covered = "".join(pieces(tokenizer, sequence.tokens[sequence.targets]))
    assert "yes." in covered


def test_placeholders_are_one_token_each_in_order(tokenizer):
    sequence = tokenizer.encode(TWO_ROUNDS)
    assert sequence.media == ("image", "audio", "image")
    assert pieces(tokenizer, sequence.tokens[sequence.media_positions]) == ["<image>", "<audio>", "<image>"]
    assert (np.diff(sequence.media_positions) > 0).all()
    assert not sequence.targets[sequence.media_positions].any()


def test_a_tokenizer_that_has_no_image_token():
    from unit.data.samples import train_backend

    special = [token for token in SPECIAL if token not in ("<image>", "<audio>")]
    tokenizer = ChatTokenizer(train_backend(special), TEMPLATE, {"bos_token": "<bos>", "eos_token": "<eos>"})
    with_media = parse_conversation(a_record("<image><image> What <audio>?", "A <image> cat."), "here")
    sequence = tokenizer.encode(with_media)
    assert sequence.media == ("image", "image", "audio", "image")
    assert "".join(pieces(tokenizer, sequence.tokens)) == (
        "<bos><user><pad><pad>ĠWhatĠ<pad>?<assistant>AĠ<pad>Ġcat.<eos>"
    )
    assert target_texts(tokenizer, with_media) == ["A ", " cat.<eos>"]


def test_prompts_for_evaluation(tokenizer):
    prompt, answer = tokenizer.encode_prompt(TWO_ROUNDS)
    assert answer == "Ünïcode € dog"
    assert prompt.media == ("image", "audio", "image")
    full = tokenizer.encode(TWO_ROUNDS)
    np.testing.assert_array_equal(prompt.tokens, full.tokens[: len(prompt.tokens)])
    assert not prompt.targets.any()
    assert tokenizer.decode(full.tokens[len(prompt.tokens) :]) == answer


# As Qwen3's: a thought before the last answer, empty where the record has none; earlier ones are left out.
THINKING = (
    "{% for m in messages %}{{ '<user>' + m.role + '\n' }}{% set said = m.content %}"
    "{% if m.role == 'assistant' %}{% set thought = said.split('</t>')[0].split('<t>')[-1] if '</t>' in said else '' %}"
    "{% set said = said.split('</t>')[-1].lstrip('\n') %}"
    "{% if loop.last %}{{ '<t>\n' + thought.strip('\n') + '\n</t>\n\n' }}{% endif %}{% endif %}"
    "{{ said + '<eos>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<user>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("begun", "said", "learned"),
    [
        *((begun, ["Hi"], ["<t>\n\n</t>\n\nHi<eos>"]) for begun in ("", "<t>\n")),
        *((begun, ["Hi", "Yes"], ["Hi<eos>", "<t>\n\n</t>\n\nYes<eos>"]) for begun in ("", "<t>\n")),
        *((begun, ["<t>Hm</t>Hi"], ["<t>\nHm\n</t>\n\nHi<eos>"]) for begun in ("", "<t>\n")),
        ("", ["Hi", "<t>Hm</t>Yes"], ["Hi<eos>", "<t>\nHm\n</t>\n\nYes<eos>"]),
    ],
)
def test_what_a_template_writes_between_the_prompt_and_an_answer_is_learned_and_expected(backend, begun, said, learned):
    template = THINKING.replace("<user>assistant\n", f"<user>assistant\n{begun}")
    tokenizer = ChatTokenizer(backend, template, {"eos_token": "<eos>"})
    turns = [each for answer in said for each in ({"from": "human", "value": "A"}, {"from": "gpt", "value": answer})]
    conversation = parse_conversation({"conversations": turns}, "here")
    texts = target_texts(tokenizer, conversation)
    assert texts == [*learned[:-1], learned[-1].removeprefix(begun)]
    prompt, expected = tokenizer.encode_prompt(conversation)
    assert tokenizer.decode(prompt.tokens).endswith(f"assistant\n{begun}")
    assert expected == texts[-1].removesuffix("<eos>")


def test_a_blank_before_an_answer_is_learned_where_a_template_writes_no_prompt_for_answers(backend):
    # As Llama 2's and Mistral's. A digit is a token of its own, and so is the blank before it then.
    template = (
        "{% for m in messages %}{{ '[Q] ' + m.content + ' [/Q]' if m.role == 'user' else ' ' + m.content + eos_token }}"
        "{% endfor %}"
    )
    tokenizer = ChatTokenizer(backend, template, {"eos_token": "<eos>"})
    turns = [{"from": "human", "value": "4 + 3"}, {"from": "gpt", "value": "7"}] * 2
    conversation = parse_conversation({"conversations": turns}, "here")
    assert target_texts(tokenizer, conversation) == [" 7<eos>", " 7<eos>"]
    prompt, expected = tokenizer.encode_prompt(conversation)
    assert tokenizer.decode(prompt.tokens).endswith("[/Q]")
    assert expected == " 7"
    # Words before an answer are a part of it nowhere.
    named = ChatTokenizer(backend, template.replace("' ' + m", "' A: ' + m"), {"eos_token": "<eos>"})
    assert target_texts(named, conversation) == ["7<eos>", "7<eos>"]


def test_a_mark_that_takes_the_white_space_behind_it_is_not_learned(backend):
    # As those of Phi-3's tokenizer.
    raw = json.loads(backend)
    for token in raw["added_tokens"]:
        token["rstrip"] = token["content"] == "<user>"
    template = "{% for m in messages %}{{ '<user>\n' + m.content + '<eos>\n' }}{% endfor %}"
    tokenizer = ChatTokenizer(json.dumps(raw), template, {"eos_token": "<eos>"})
    for answer in ("Hi", "\n Hi"):
        assert target_texts(tokenizer, parse_conversation(a_record("A", answer), "here")) == ["Hi<eos>"]


def test_answers_whose_thoughts_a_template_leaves_out_are_refused(backend):
    tokenizer = ChatTokenizer(backend, THINKING, {"eos_token": "<eos>"})
    left_out = ChatTokenizer(backend, THINKING.replace("thought.strip('\n')", "''"), {"eos_token": "<eos>"})
    thoughtful = a_record("A", "<t>Hm</t>Hi")
    twice = {"conversations": thoughtful["conversations"] * 2}
    for made, record in ((left_out, thoughtful), (tokenizer, twice)):
        with pytest.raises(UserError, match="rewrites answers"):
            made.encode(parse_conversation(record, "here"))
    twice["conversations"][1] = twice["conversations"][1] | {"loss": False}
    twice["conversations"][3] = {"from": "gpt", "value": "<t>Hm</t>Hi"}
    assert target_texts(tokenizer, parse_conversation(twice, "here")) == ["<t>\nHm\n</t>\n\nHi<eos>"]


@pytest.mark.parametrize("separate", [True, False])
def test_directories_open_as_transformers_opens_them(tmp_path, backend, separate):
    transformers = pytest.importorskip("transformers")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": {"content": "<eos>"}}
    config["eos_token"] = {"__type": "AddedToken", "content": "<eos>", "special": True}
    (tmp_path / "tokenizer.json").write_text(backend)
    if separate:
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    else:
        config["chat_template"] = TEMPLATE
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = ChatTokenizer.from_directory(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    roles = {"user": "user", "assistant": "assistant", "system": "system"}
    messages = [{"role": roles[turn.role], "content": turn.text} for turn in TWO_ROUNDS.turns]
    expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    sequence = ours.encode(TWO_ROUNDS)
    assert sequence.tokens.tolist() == list(expected["input_ids"])
    assert sequence.targets.astype(int).tolist() == list(expected["assistant_masks"])
    again = ChatTokenizer.from_transformers(theirs).encode(TWO_ROUNDS)
    assert again.tokens.tolist() == sequence.tokens.tolist()


def test_fingerprints_follow_what_matters(backend, tokenizer):
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    assert ChatTokenizer(backend, TEMPLATE, special).fingerprint == tokenizer.fingerprint
    assert ChatTokenizer(backend, TEMPLATE + " ", special).fingerprint != tokenizer.fingerprint
    assert ChatTokenizer(backend, TEMPLATE, special | {"eos_token": "<pad>"}).fingerprint != tokenizer.fingerprint
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint == tokenizer.fingerprint
    assert copy.encode(TWO_ROUNDS).tokens.tolist() == tokenizer.encode(TWO_ROUNDS).tokens.tolist()


def test_wrong_tokenizers_and_templates(tmp_path, backend):
    with pytest.raises(UserError, match="no such directory"):
        ChatTokenizer.from_directory(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no chat template and no eos_token"):
        ChatTokenizer(backend, None, {})
    refusing = ChatTokenizer(backend, "{{ raise_exception('roles must alternate') }}", {"eos_token": "<eos>"})
    with pytest.raises(UserError, match="roles must alternate"):
        refusing.encode(TWO_ROUNDS)
    rewriting = "{% for m in messages %}{{ m.content | upper }}<eos>{% endfor %}"
    with pytest.raises(UserError, match="rewrites answers"):
        ChatTokenizer(backend, rewriting, {}).encode(TWO_ROUNDS)
    dropping = "{% for m in messages %}{% if m.role != 'user' %}{{ m.content }}<eos>{% endif %}{% endfor %}"
    with pytest.raises(UserError, match="leaves out what the user says"):
        ChatTokenizer(backend, dropping, {}).encode(TWO_ROUNDS)
    plain = Tokenizer(models.BPE({"a": 0}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel()
    with pytest.raises(UserError, match="no special token"):
        ChatTokenizer(plain.to_str(), TEMPLATE, {}).encode(TWO_ROUNDS)


def test_no_torch_is_imported(tmp_path):
    code = (
        "import sys, pkgutil, importlib, motet.data\n"
        "for module in pkgutil.iter_modules(motet.data.__path__, 'motet.data.'): importlib.import_module(module.name)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules and 'scipy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
