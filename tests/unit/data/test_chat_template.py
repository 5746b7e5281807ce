"""Templates: what they leave out, which answers are learned, and that a broken one ends in a sentence."""

import pytest

from motet.core.errors import UserError
from motet.data.chat_template import ChatTemplate
from motet.data.conversation import parse_conversation

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
IN_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
    "{{ part.text if part.type == 'text' else '<' + part.type + '>' }}{% endfor %};{% endfor %}"
)
FIRST_SYSTEM = PLAIN.replace("[{{", "{% if m.role != 'system' or loop.first %}[{{").replace(
    "{% endfor", "{% endif %}{% endfor"
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"eos_token": "<eos>"})


def turns(*texts: str, system: tuple[str, ...] = (), loss: tuple[bool, ...] = ()):
    """Questions and answers in turn; loss: of the answers."""
    listed = [{"from": "system", "value": text} for text in system]
    listed += [{"from": ("human", "gpt")[place % 2], "value": text} for place, text in enumerate(texts)]
    for turn, flag in zip([turn for turn in listed if turn["from"] == "gpt"], loss):
        turn["loss"] = flag
    return parse_conversation({"conversations": listed}, "here").turns


def learned(source: str, *args, parts=frozenset(), **options) -> list[str]:
    text, spans, _ = template(source).render_with_answers(turns(*args, **options), parts)
    return [text[start:end] for start, end in spans]


def complaint(source: str, *args, **options) -> str:
    with pytest.raises(UserError) as caught:
        template(source).render_with_answers(turns(*(args or ("Hi", "Ho")), **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_answers_without_loss_are_no_spans():
    assert learned(PLAIN, "a", "b", "c", "d", "e", "f", loss=(True, False, True)) == ["b", "f"]
    assert learned(MARKED, "a", "b", "c", "d", "e", "f", loss=(True, False, True)) == ["b<eos>", "f<eos>"]
    # The same answers: they are told apart by where they stand, not by what they say.
    assert learned(MARKED, "a", "b", "a", "b", loss=(False, True)) == ["b<eos>"]
    text, spans, _ = template(MARKED).render_with_answers(turns("a", "b", "a", "b", loss=(False, True)))
    assert text[: spans[0][0]].endswith("[user]a[assistant]")
    assert text[spans[0][1] :] == ""


def test_marks_that_do_not_tell_turns_apart():
    joined = "{% generation %}{% for m in messages %}{{ m.content }};{% endfor %}{% endgeneration %}"
    assert learned(joined, "a", "b") == ["a;b;"]
    assert "does not tell which turn they are of" in complaint(joined, "a", "b", "a", "c", loss=(True, False))


def test_a_generation_tag_that_marks_nothing():
    assert learned("{# {% generation %} #}" + PLAIN, "a", "b") == ["b"]


def test_private_characters_in_a_text_are_no_marks():
    odd = "x".join(map(chr, range(0xE000, 0xE200)))
    for source in (PLAIN, MARKED):
        assert [text.removesuffix("<eos>") for text in learned(source, odd, odd, odd, "b", loss=(True, False))] == [odd]


def test_turns_that_a_template_leaves_out():
    assert learned(FIRST_SYSTEM, "a", "b", system=("Be brief.",)) == ["b"]
    assert complaint(FIRST_SYSTEM, "a", "b", system=("Be brief.", "And kind.")) == (
        "the tokenizer's chat template leaves out what the system says ('And kind.')"
    )
    assert "leaves out what the system says" in complaint(FIRST_SYSTEM, "a", "b", system=("Be brief.",) * 2)
    no_system = PLAIN.replace("messages %}", "messages if m.role != 'system' %}")
    assert "leaves out what the system says" in complaint(no_system, "a", "b", system=("Be brief.",))
    assert "leaves out what the system says" in complaint(no_system, "Be brief: why?", "b", system=("Be brief",))
    last_only = "{% generation %}{{ messages[-1].content }}{% endgeneration %}"
    assert "leaves out what the user says ('Hi')" in complaint(last_only)
    with pytest.raises(UserError, match="leaves out what the system says"):
        template(no_system).render(turns("Hi", "Ho", system=("x y",))[:-1], generation_prompt=True)


def test_a_text_that_is_rewritten_is_not_left_out():
    rewriting = MARKED.replace("{% else %}{{ m.content }}", "{% else %}{{ m.content | upper | trim }}")
    assert learned(rewriting, " a b ", "c") == ["c<eos>"]


def test_templates_that_understand_parts_alone():
    assert template(IN_PARTS).roles_in_parts == {"system", "user", "assistant"}
    assert template(PLAIN).roles_in_parts == template(MARKED).roles_in_parts == frozenset()
    assert template(IN_PARTS).render(turns("Hi", "Ho", system=("Sys",))) == "[system]Sys;[user]Hi;[assistant]Ho;"
    both = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }};{% endfor %}"
    assert template(both).roles_in_parts == frozenset()
    answers_in_parts = (
        "{% for m in messages %}{{ m.content[0].text if m.role == 'assistant' else m.content }};{% endfor %}"
    )
    assert template(answers_in_parts).roles_in_parts == {"assistant"}
    assert learned(answers_in_parts, "Hi", "Ho") == ["Ho"]


def test_items_are_parts_where_the_template_writes_them():
    asked = turns("See <image><image> and <audio>, <image>", "Yes.")
    expected = "[user]See <image><image> and <audio>, <image>;[assistant]Yes.;"
    for parts in (set(), {"image"}, {"image", "audio"}):
        assert template(IN_PARTS).render(asked, parts) == expected
    listed = "{% for m in messages %}{{ m.content if m.content is string else m.content | tojson }};{% endfor %}"
    assert template(listed).render(asked, {"image"}) == (
        '[{"type": "text", "text": "See "}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": '
        '" and <audio>, "}, {"type": "image"}];Yes.;'
    )


def test_media_in_answers_need_marks():
    with pytest.raises(UserError, match=r"an answer holds media, and .* mark them in the template"):
        template(IN_PARTS).render_with_answers(turns("Hi", "A <image>."), {"image"})
    marked = IN_PARTS.replace("{% for part", "{% generation %}{% for part").replace(";", "{% endgeneration %}")
    assert learned(marked, "Hi", "A <image>.", parts={"image"}) == ["Hi", "A <image>."]


GROW = "{%% set x = namespace(a='aa') %%}{%% for i in range(60) %%}{%% set x.a = %s %%}{%% endfor %%}{{ x.a }}"
"""Sixty times as much, each time."""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for m in %}", "chat template is no Jinja (line 1: Expected an expression, got 'end of statement block')"),
        ("\n{% if x %}", "chat template is no Jinja (line 2: Unexpected end of template"),
        ("{{ 'a' | nothing }}", "chat template is no Jinja (line 1: No filter named 'nothing'.)"),
        ("{{ " + "(" * 5000 + " }}", "chat template is no Jinja (RecursionError"),
        ("{{ 1 / 0 }}", "refuses the conversation: ZeroDivisionError: division by zero"),
        ("{{ messages[0].nothing.more }}", "refuses the conversation: 'dict object' has no attribute 'nothing'"),
        ("{{ messages[0] + 1 }}", "refuses the conversation: TypeError: unsupported operand type(s)"),
        ("{{ raise_exception('no system') }}", "refuses the conversation: no system"),
        ("{{ raise_exception(3) }}", "refuses the conversation: 3"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses the conversation: RecursionError"),
        ("{% for a in range(10 ** 12) %}{% endfor %}", "it makes a value that would fill the memory"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "its loops take more than 4,194,304 passes in all",
        ),
        ("{% set t = 'x' * 9999999 %}{% for a in t %}{% endfor %}", "its loops take more than 4,194,304 passes in all"),
        ("{{ 'x' * 10 ** 10 }}", "it makes a value that would fill the memory"),
        ("{{ [1] * 10 ** 10 }}", "it makes a value that would fill the memory"),
        ("{{ 9 ** (9 ** 9) }}", "it makes a value that would fill the memory"),
        (GROW % "x.a ~ x.a", "it makes a value that would fill the memory"),
        (GROW % "x.a + x.a", "it makes a value that would fill the memory"),
        (GROW % "(x.a, x.a) | join", "it makes a value that would fill the memory"),
        (GROW.replace("'aa'", "9") % "x.a * x.a", "it makes a value that would fill the memory"),
        ("{{ '%9999999999d' % 1 }}", "it writes with a width that would fill the memory ('%9999999999d')"),
        ("{{ '%*d' % (9999999999, 1) }}", "it writes with a width that would fill the memory ('%*d')"),
        ("{{ '{:>9999999999}'.format(1) }}", "it writes with a width that would fill the memory"),
        ("{{ '%9999999999d' | format(1) }}", "it writes with a width that would fill the memory"),
        ("{{ 'a' | center(9999999999) }}", "it makes a value that would fill the memory"),
        ("{{ 'a'.ljust(9999999999) }}", "it makes a value that would fill the memory"),
        ("{{ ('a' * 99999).replace('a', 'b' * 99999) }}", "it makes a value that would fill the memory"),
        ("{{ ('a' * 99999) | replace('a', 'b' * 99999) }}", "it makes a value that would fill the memory"),
        ("{{ ('b' * 99999).join('a' * 99999) }}", "it makes a value that would fill the memory"),
        ("{% for a in range(99) %}{{ 'x' * 999999 }}{% endfor %}", "it writes more than 16,777,216 characters"),
        ("{{ strftime_now('%d') }}{{ messages[0].content }}", "it asks for today's date, so tokens would differ"),
        ("{{ [1, 2] | random }}", "No filter named 'random'"),
        ("{{ lipsum() }}", "refuses the conversation: 'lipsum' is undefined"),
        ("{{ messages.__class__.__mro__ }}", "refuses the conversation: "),
    ],
)
def test_broken_templates(source, said):
    assert said in complaint(source)


def test_a_block_that_doubles_itself_is_stopped():
    source = "{% set x = namespace(a='aa') %}{% for i in range(60) %}{% set t %}{{ x.a }}{{ x.a }}{% endset %}"
    assert "fill the memory" in complaint(source + "{% set x.a = t %}{% endfor %}")


def test_what_templates_do_is_done_within_bounds():
    source = (
        "{% for m in messages %}{{ loop.index ~ '/' ~ loop.length }}{{ ',' if not loop.last }}{{ m.content }};"
        "{% endfor %}"
        "{{ '%3d|%-2s' % (7, 'x') }}{{ '{:>3}'.format('a') }}{{ 'x'.replace('x', 'y') ~ none }}{{ [1] + [2] }}"
        "{{ 2 ** 10 * 3 }}{{ messages | map(attribute='role') | join(', ') }}"
        "{% for part in [[1, [2]], 3] recursive %}{{ part if part is number else loop(part) }}{% endfor %}"
    )
    said = template(source).render(turns("a", "b"))
    assert said == "1/2,a;2/2b;  7|x   ayNone[1, 2]3072user, assistant123"


def test_a_template_with_a_date_of_its_own():
    source = "{{ strftime_now('%d') if strftime_now is defined else '26 Jul 2024' }}:" + PLAIN
    assert template(source).render(turns("a", "b")).startswith("26 Jul 2024:")
