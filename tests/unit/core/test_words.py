"""Counts in sentences are in the singular where there is one."""

from motet.core.words import counted_words


def test_one_is_in_the_singular():
    assert counted_words(1, "rank") == "1 rank"
    assert [counted_words(number, "rank") for number in (0, 2, 1000)] == ["0 ranks", "2 ranks", "1,000 ranks"]
    assert [counted_words(number, "patch", "patches") for number in (1, 2)] == ["1 patch", "2 patches"]
