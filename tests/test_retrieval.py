"""Latents read as tokens: an embedding is nearest to itself, a merged group to its members; ranks by hand first."""

import json
from dataclasses import replace

import pytest
import torch
from families import EXAMPLES, FAMILIES, tiny_lm
from paper_figures import ranks

from colar.engine import reference
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.look import thought
from colar.look.reference_chain import reference_passes
from colar.methods import pretrained, registry
from colar.methods.grouping import compress

LIMITS = Decoding(max_latents=8, max_completion_length=4)
CHAINS = [example for example in EXAMPLES if example.steps]
HEADS = ("gaussian", "deterministic", "sequential")


def build(family="llama", head="gaussian", **config):
    lm = tiny_lm(family)
    method = (
        registry.build("sequential", config)
        if head == "sequential"
        else registry.build("colar", {"head": head, **config})
    )
    pretrained.attach(lm, method, seed=3)
    method.prepare(lm, EXAMPLES)
    return lm.eval(), method


def passes_of(lm, method, c=2):
    return list(reference_passes(lm, method, CHAINS, method.Params(c)))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_embedding_is_nearest_to_its_own_token_and_a_group_to_its_members(family):
    lm = tiny_lm(family)
    ids = torch.tensor([[30, 41, 52, 63]])
    with torch.no_grad():
        latents = compress(lm.embed(ids), torch.tensor([[2, 2]]))
        vocabulary = thought.vocabulary_of(lm)
        own = vocabulary.nearest(lm.embed(ids)[0], 3)
    assert [near[0].token_id for near in own] == [30, 41, 52, 63]
    assert all(near[0].cosine == pytest.approx(1, abs=1e-5) for near in own)
    merged = vocabulary.nearest(latents[0], 2)
    assert [{n.token_id for n in near} for near in merged] == [{30, 41}, {52, 63}]
    by_hand = torch.cosine_similarity(latents[0, 0], lm.embed(torch.tensor(merged[0][0].token_id)), dim=0)
    assert merged[0][0].cosine == pytest.approx(by_hand.item(), abs=1e-5)


def test_a_chain_is_read_as_its_tokens_and_latents_by_their_neighbours():
    lm = tiny_lm("llama")
    for name in ("cot", "colar"):
        method = registry.build(name)
        pretrained.attach(lm, method, 0)
        method.prepare(lm, [])
        short = Decoding(max_latents=3, max_completion_length=2)
        request = Request("a", "How many?", method.Params(), short, keep_latents=True)
        completion = reference.complete(lm, method, request)
        thoughts = thought.read_thoughts(lm, completion, 4)
        assert len(thoughts) == completion.length == 3
        if name == "cot":
            assert [t["kind"] for t in thoughts] == ["token"] * 3
            texts = [lm.template.token(i) for i in completion.thought_ids]
            assert [t["tokens"][0]["text"] for t in thoughts] == texts
            # Bytes of one character: its text is that of the chain.
            assert "".join(t["text"] for t in thoughts) == lm.template.tokenizer.decode(
                completion.thought_ids
            )
        else:
            assert all(t["kind"] == "latent" and len(t["neighbours"]) == 4 for t in thoughts)
            assert all(t["sigma"] > 0 and 0 <= t["stop_probability"] <= 1 for t in thoughts)
    without = reference.complete(lm, method, Request("a", "q", method.Params(), short))
    assert thought.read_thoughts(lm, without) == []


# Accuracy


@pytest.mark.parametrize(
    ("step", "kinds"),
    [
        (
            ["<<", "2", "0", "-", "4", "=", "1", "6", ">>"],
            "bracket operand operand sign operand sign result result bracket",
        ),
        (
            [" <<", "3.", "5", "*", "(", "2", ")", "="],
            "bracket operand operand sign sign operand sign sign",
        ),
        (["=-", "7", " apples", ">>"], "sign result result bracket"),
        (["Every", " lempus", " 12"], "text text operand"),
        (["a", "=", "b", "=", "8"], "text sign text sign result"),
        (["a", " ", "b", "\n"], "text text text text"),
    ],
)
def test_kinds_of_tokens_by_hand(step, kinds):
    last = max((i for i, text in enumerate(step) if "=" in text), default=len(step))
    assert [
        ranks.kind_of(text, i > last and text.strip("<> ") != "") for i, text in enumerate(step)
    ] == kinds.split()


def test_ranks_by_hand():
    """Four tokens: two axes, their opposite, and one between them."""
    vocabulary = thought.EmbeddingIndex(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.6, 0.8]]))
    latents = torch.tensor([[3.0, 0.3], [1.0, 1.0]])
    # The first latent's order: 0, 3, 1, 2. The second's: 3, then 0 and 1 alike, then 2.
    found = ranks.rank_tokens(latents, [[0, 1, 2], [0, 1, 0]], vocabulary)
    assert found == [[0, 2, 3], [1, 1, 1]]
    # Zeros point nowhere: no token has been found.
    assert ranks.rank_tokens(torch.zeros(1, 2), [[0, 1]], vocabulary) == [[4, 4]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_references_latents_are_read_as_nearest_tokens_say(family):
    """Against the reader of people, one thought at a time."""
    lm, method = build(family)
    for each in passes_of(lm, method):
        vocabulary = thought.vocabulary_of(lm)
        found = ranks.reference_ranks(lm, each, vocabulary)
        assert [r["position"] for r in found] == list(range(len(each.latents_KD)))
        for k, neighbours in enumerate(vocabulary.nearest(each.latents_KD, 5)):
            near = [n.token_id for n in neighbours]
            for token_id, rank in zip(found[k]["token_ids"], found[k]["ranks"], strict=True):
                assert (near.index(token_id) if token_id in near else None) == (rank if rank < 5 else None)
    # At c = 1 a thought is its token.
    for each in passes_of(lm, method, c=1):
        assert all(r["ranks"] == [0] for r in ranks.reference_ranks(lm, each, thought.vocabulary_of(lm)))


@pytest.mark.parametrize("head", HEADS)
def test_every_written_thought_and_own_ones_as_far_as_the_chain_goes_are_ranked(head):
    lm, method = build(head=head)
    vocabulary = thought.vocabulary_of(lm)
    requests = [Request(e.id, e.question, method.Params(2), LIMITS, keep_latents=True) for e in CHAINS]
    completions = Engine(lm, method, 4).generate(requests)
    written, own = [], []
    for each, completion in zip(passes_of(lm, method), completions, strict=True):
        written += ranks.written_ranks(lm, each, vocabulary)
        own += ranks.own_ranks(lm, each, completion, vocabulary)
    assert len(written) == sum(len(each.latents_KD) for each in passes_of(lm, method))
    assert 0 < len(own) <= sum(completion.length for completion in completions)
    for found in (written, own):
        assert json.loads(json.dumps(found)) == found


def test_a_question_that_is_asked_twice_is_one():
    lm, method = build()
    again = replace(CHAINS[0], id="again", cluster=CHAINS[0].id)
    found = set()
    for each in reference_passes(lm, method, [CHAINS[0], again], method.Params(2)):
        request = Request(each.example.id, each.example.question, method.Params(2), LIMITS, keep_latents=True)
        (completion,) = Engine(lm, method, 1).generate([request])
        vocabulary = thought.vocabulary_of(lm)
        ranked = ranks.written_ranks(lm, each, vocabulary) + ranks.reference_ranks(lm, each, vocabulary)
        found |= {rank["question"] for rank in ranked + ranks.own_ranks(lm, each, completion, vocabulary)}
    assert found == {CHAINS[0].id}
