"""The toy backbone `tiny`: a Llama of under 1M parameters from scratch, with a tokenizer of its own.

The tokenizer is built in code, the same on every machine: byte-level BPE, so that any text can be encoded,
whose merges are learnt from the text of the built-in `arithmetic` problems; a number of up to two digits is one token.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from colar.data import synthetic

SPECIAL = ("<bos>", "<eos>", "###")
CONTEXT = 1024


def build(seed: int = 0) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Fresh weights drawn from `seed`, and the tokenizer."""
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = LlamaForCausalLM(config)
    return lm, tokenizer


@lru_cache(maxsize=1)
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|\d{1,2}| ?[^\sA-Za-z\d]+|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=768,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    examples = synthetic.generate(synthetic.ArithmeticConfig(), "train", 2000, seed=0)
    texts = [
        text for example in examples for text in (example.question, " ".join(example.steps), example.answer)
    ]
    texts += [str(n) for n in range(100)] * 20
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A new copy of the tokenizer (a tokenizer is mutable, its training is cached)."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), bos_token="<bos>", eos_token="<eos>"
    )
