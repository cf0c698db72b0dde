"""The toy backbones `tiny` and `tiny-digits`: a Llama of under 1M parameters from scratch, with a tokenizer of its own.

The tokenizer is built in code, the same on every machine: byte-level BPE over the built-in problems' own text, so
that any text can be encoded. A number of up to two digits is one piece, without a space: 12 is the same token
in a question and in a step. Runs of words are not split before merging, so a frequent phrase (". How many ")
becomes one piece, which halves a question's length. An equation such as <<3*4=12>> is seven tokens. Those of
`tiny-digits` are cut into digits: eight.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from colar.data import arithmetic

SPECIAL = ("<bos>", "<eos>", "<pad>", "###")
VOCABULARY = 704
CONTEXT = 1024
INIT_STD = 0.06
"""About 0.7 / sqrt(width). Llama's 0.02 is made for widths in the thousands; here it costs accuracy."""
DIGITS = {"tiny": 2, "tiny-digits": 1}
"""The most digits of a token, by the backbone's name."""
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


def build(seed: int = 0, digits: int = 2) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Fresh weights drawn from `seed`, and the tokenizer, whose tokens have at most `digits` digits."""
    tokenizer = build_tokenizer(digits)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        initializer_range=INIT_STD,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    # The caller's random state stays as it is: weights are a function of `seed` alone.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = LlamaForCausalLM(config)
    return lm, tokenizer


def build_tokenizer(digits: int = 2) -> PreTrainedTokenizerFast:
    """A new copy of the tokenizer (a tokenizer is mutable; its training is done once)."""
    core = Tokenizer.from_str(_trained(digits))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


@lru_cache(maxsize=2)
def _trained(digits: int) -> str:
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
    core.train_from_iterator(_corpus(), trainer)
    return str(core.to_str())


def _corpus() -> list[str]:
    """Problems, the speed prompts, and the numbers 0..99 often enough to become single tokens."""
    examples = arithmetic.generate(arithmetic.ArithmeticConfig(), "train", 1500, seed=0)
    texts = [example.question for example in examples]
    texts += [" ".join(example.steps) for example in examples]
    # Merges are learnt from the most frequent pair down, so repetition is what puts a piece into the vocabulary.
    texts += [f" (Thinking speed: {c})" for c in range(1, 6)] * 100
    texts += [str(number) for number in range(100)] * 2000
    return texts
