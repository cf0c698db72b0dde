"""Train the tokenizers of the built-in backbones `tiny` and `tiny-digits`, and write them where colar reads them.

    python scripts/train_tiny_tokenizers.py [FOLDER]

Byte-level BPE over the built-in problems' own text, so that any text can be encoded. A number of up to two digits is
one piece, without a space: 12 is the same token in a question and in a step. Runs of words are not split before
merging, so a frequent phrase (". How many ") becomes one piece, which halves a question's length. An equation such as
<<3*4=12>> is seven tokens. Those of `tiny-digits` are cut into digits: eight.
"""

import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from colar.data import arithmetic
from colar.model import backbones

FOLDER = Path(backbones.__file__).with_name("tokenizers")
MOST_DIGITS = {"tiny": 2, "tiny-digits": 1}
"""Of a token, by the backbone's name."""
SPECIAL = ("<bos>", "<eos>", "<pad>", "###")
VOCABULARY = 704
PIECES = "|".join(
    (
        r"###",  # the separator
        r" ?<<",  # the brackets of a step
        r">>",
        r"\d{1,DIGITS}",  # a number
        r"[-+*/=]",  # an operator
        r" ?\([^\d<>+*/=#-]*",  # the words of the speed prompt
        r"(?:(?! \()[^\d<>+*/=#(-])+",  # a run of the rest, up to the next speed prompt
        r"[<>#]",  # single characters of the marks above
    )
)
"""The pieces into which a text is split before merges: no merge crosses a border between two of these."""


def trained(digits: int) -> Tokenizer:
    """A tokenizer whose tokens have at most `digits` digits."""
    # ignore_merges: a piece that is in the vocabulary as a whole is one token, even if its merges differ.
    core = Tokenizer(models.BPE(ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES.replace("DIGITS", str(digits))), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(corpus(), trainer)
    return core


def corpus() -> list[str]:
    """Problems, the speed prompts, and the numbers 0..99 often enough to become single tokens."""
    examples = arithmetic.generate(arithmetic.ArithmeticConfig(), "train", 1500, seed=0)
    texts = [example.question for example in examples]
    texts += [" ".join(example.steps) for example in examples]
    # Merges are learnt from the most frequent pair down, so repetition is what puts a piece into the vocabulary.
    texts += [f" (Thinking speed: {c})" for c in range(1, 6)] * 100
    texts += [str(number) for number in range(100)] * 2000
    return texts


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, digits in MOST_DIGITS.items():
        path = folder / f"{name}.json"
        trained(digits).save(str(path), pretty=False)
        print(path)
