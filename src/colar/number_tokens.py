"""Numbers as tokens: 10 to 99, or 10 to 999, added to a tokenizer that has one token a digit.

    text      <<125*48=6000>>                $1,234.50               007
    digits    << 1 2 5 * 4 8 = 6 0 0 0 >>    $ 1 , 2 3 4 . 5 0       0 0 7
    to 99     << 12 5 * 48 = 60 0 0 >>       $ 1 , 23 4 . 50         0 0 7
    to 999    << 125 * 48 = 600 0 >>         $ 1 , 234 . 50          0 0 7

A number is cut from the left, each time at the longest token, as Llama 3's tokenizer cuts it (`\\p{N}{1,3}`). Llama 3
has a token for 007 and 05, too. Here a zero in front stays a digit, and what follows is cut as if it stood alone.

Added tokens match in the raw text, before the tokenizer normalises it or splits it into words. So a space before a
number is a token of its own, and a number has the same tokens in a question, in a chain and in an answer.
"""

from __future__ import annotations

from transformers import AddedToken, PreTrainedTokenizerBase

from colar.checks import check_holds

LARGEST = (99, 999)
"""Values of `model.number_tokens`: the largest number that is a token of its own."""

PROBES = (
    "12",
    "Ann has 12 pens, and 345 eggs.",
    " <<12*5=60>> <<60-8.25=51.75>>",
    "$1,234.50 x10y 007\n98\n\n76 %",
)
"""Texts that must come back as they did before the tokens were added."""


def check(name: str, largest: int | None) -> None:
    """Reject all but the allowed values, and None."""
    check_holds(name, largest is None or largest in LARGEST, largest, "99, 999 or null")


def add(tokenizer: PreTrainedTokenizerBase, largest: int) -> list[int]:
    """Add the numbers from 10 to `largest` to a tokenizer. Returns their ids, ascending with the numbers.

    ValueError where the tokenizer has numbers of its own, or would not give back a text with such tokens.
    """
    _check_digits(tokenizer, largest)
    before = [_round_trip(tokenizer, text) for text in PROBES]
    # Not special: a decoded text shows them. Not normalized: a normaliser may put a space before each piece.
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in _numbers(largest)])
    for text, expected in zip(PROBES, before, strict=True):
        found = _round_trip(tokenizer, text)
        if found != expected:
            raise ValueError(
                f"model.number_tokens must be null for this tokenizer: with numbers as tokens it gives {expected!r} "
                f"back as {found!r}"
            )
    return ids(tokenizer, largest)


def ids(tokenizer: PreTrainedTokenizerBase, largest: int) -> list[int]:
    """Ids of the numbers from 10 to `largest`. ValueError where the tokenizer lacks one as a token."""
    vocabulary = tokenizer.get_vocab()
    missing = [text for text in _numbers(largest) if text not in vocabulary]
    if missing:
        raise ValueError(
            f"the tokenizer has no token for {missing[0]}, where numbers to {largest} are tokens"
        )
    return [vocabulary[text] for text in _numbers(largest)]


def digit_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the digits 0 to 9. ValueError where one is not a token."""
    vocabulary = tokenizer.get_vocab()
    missing = [digit for digit in "0123456789" if digit not in vocabulary]
    if missing:
        raise ValueError(
            f"model.number_tokens must be null for this tokenizer: it has no token for the digit {missing[0]}"
        )
    return [vocabulary[digit] for digit in "0123456789"]


def _check_digits(tokenizer: PreTrainedTokenizerBase, largest: int) -> None:
    """Reject a tokenizer that does not spell each number by its digits, alone and after a space."""
    digits = digit_ids(tokenizer)
    for text in _numbers(largest):
        expected = [digits[int(digit)] for digit in text]
        for shown in (text, f" {text}"):
            found = tokenizer.encode(shown, add_special_tokens=False)
            # A tokenizer may put a token for the space, or for the start of a word, before the digits.
            if found[-len(expected) :] != expected:
                pieces = tokenizer.convert_ids_to_tokens(found)
                raise ValueError(
                    "model.number_tokens must be null for this tokenizer: it has tokens for numbers already, "
                    f"{shown!r} is {pieces}"
                )


def _numbers(largest: int) -> list[str]:
    return [str(number) for number in range(10, largest + 1)]


def _round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    found = tokenizer.encode(text, add_special_tokens=False)
    return str(tokenizer.decode(found, clean_up_tokenization_spaces=False))
