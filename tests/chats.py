"""Chat formats of model families, in short templates of our own, on the tiny tokenizers of `families.py`."""

from __future__ import annotations

from typing import Any

import torch
from families import EXAMPLES, _model, build_tokenizer
from transformers import PreTrainedTokenizerFast

from colar.model.backbones import Backbone
from colar.model.latent_lm import LatentLM
from colar.template.template import TemplateConfig

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    # A system message of its own where there is none.
    "qwen2.5": "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are made here.<|im_end|>\n{% endif %}"
    + CHATML
    + PROMPT,
    # Earlier reasoning is left out; without thinking the prompt ends in an empty one.
    "qwen3": """\
{%- for m in messages %}
    {%- set content = m.content %}
    {%- if m.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}""",
    "llama3": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant"
    "<|end_header_id|>\n\n{% endif %}",
    # The system message stands in the first user's turn.
    "gemma3": """\
{{ bos_token }}
{%- set first = '' %}
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content + '\n\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}
    {{- m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    # Rejects a system message.
    "gemma2": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "smollm2": "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nI am small"
    "<|im_end|>\n{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    + PROMPT,
    # The system message stands in the last user's turn; roles must alternate.
    "mistral": """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- bos_token }}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {%- if m.role == 'user' %}
        {{- '[INST] ' + (system + '\n\n' if loop.last and system is defined else '') + m.content + '[/INST]' }}
    {%- else %}
        {{- ' ' + m.content + eos_token }}
    {%- endif %}
{%- endfor %}""",
    # Leaves a system message out without a word.
    "old": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    # The prompt begins the reasoning.
    "r1": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
}
IM = {"eos_token": "<|im_end|>", "extra": ["<|im_start|>"]}
TURNS = {"extra": ["<start_of_turn>", "<end_of_turn>"]}
INST = {"extra": ["[INST]", "[/INST]"]}
TOKENS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5": ("qwen2", IM),
    "qwen3": ("qwen2", {**IM, "words": ["<think>", "</think>"]}),
    "llama3": (
        "llama",
        {"eos_token": "<|eot_id|>", "extra": ["<|start_header_id|>", "<|end_header_id|>"]},
    ),
    "gemma3": ("gemma3", TURNS),
    "gemma2": ("gemma3", TURNS),
    "smollm2": ("gpt2", {**IM, "bos_token": "<|im_start|>"}),
    "mistral": ("gemma3", INST),
    "old": ("gemma3", INST),
    "r1": ("llama", {"extra": ["<|User|>", "<|Assistant|>"], "words": ["<think>", "</think>"]}),
}
"""Of each: the family of its tokenizer, and its tokens. `words` are added tokens that are not special."""
KINDS = tuple(TEMPLATES)
END = {"gemma3": "<end_of_turn>", "gemma2": "<end_of_turn>", "mistral": "<eos>", "old": "<eos>"} | {
    "llama3": "<|eot_id|>",
    "r1": "<|end_of_text|>",
}
"""The token that ends a turn; <|im_end|> for the others."""


def chat_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A new tokenizer with the special tokens and the template of a family."""
    family, tokens = TOKENS[kind]
    tokenizer = build_tokenizer(family)
    extra = list(tokens.get("extra", []))
    named = {name: tokens[name] for name in ("bos_token", "eos_token") if name in tokens}
    tokenizer.add_special_tokens(named)
    tokenizer.add_tokens(extra, special_tokens=True)
    tokenizer.add_tokens(tokens.get("words", []))
    tokenizer.chat_template = TEMPLATES[kind]
    return tokenizer


def chat_lm(kind: str, seed: int = 0) -> LatentLM:
    """A tiny random model of the family with the chat format, in eval mode."""
    family, _ = TOKENS[kind]
    tokenizer = chat_tokenizer(kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = _model(family, tokenizer, tied=family != "llama", scale=0.5)
    made = Backbone(f"tiny-{kind}", lm.eval(), tokenizer)
    return LatentLM.from_backbone(made, TemplateConfig(format="chat")).eval()


CONTEXTS: dict[str, tuple[tuple[str, str], ...]] = {
    "none": (),
    "system": (("system", "Be brief; use digits."),),
    "turns": (("user", "Hi! What is 1+1?"), ("assistant", "It is 2.")),
    "all": (("system", "Be brief."), ("user", "Hi <b>!"), ("assistant", "Yes?")),
}
QUESTION = EXAMPLES[0].question
