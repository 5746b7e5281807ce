"""What the card of an export says beside what has learned."""

from motet.data.drawn import DrawnVocabulary
from motet.data.text import ChatTokenizer
from motet.train.export import ends_of_answers
from unit.data.samples import train_backend

TURNS = "{% for m in messages %}<user>{{ m.content }}<pad>\n{% endfor %}"


def test_a_card_says_by_which_tokens_answers_end():
    """Turns may end by another token than texts, which is all that generation_config.json of a base model knows."""
    tokenizer = ChatTokenizer(train_backend(), TURNS, {"eos_token": "<eos>"})
    numbers = sorted(tokenizer.end_tokens)
    said = ends_of_answers(tokenizer)
    assert len(numbers) == 2
    assert f"`generate(..., eos_token_id={numbers})`" in said
    assert "`<eos>`" in said
    assert "`<pad>`" in said
    assert ends_of_answers(DrawnVocabulary(8)) == ""
