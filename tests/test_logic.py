"""`prosqa-made` and `prontoqa-made`: every row is read back from its words and solved by search, nothing is trusted."""

import json
import os
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colar.data import catalogue, formats, logic, prontoqa, prosqa, sources
from colar.data.example import SPLITS
from colar.data.judge import answers
from colar.data.prontoqa import ProntoqaConfig
from colar.data.prosqa import ProsqaConfig

MADE = {"prosqa-made": (prosqa, ProsqaConfig()), "prontoqa-made": (prontoqa, ProntoqaConfig())}
MANY = 2_000
ROOT = Path(__file__).resolve().parent.parent

FACT = re.compile(r"(?:(Every) )?(\w+) is a (\w+)\.")
CHOICE = re.compile(r"Is (\w+) a (\w+) or (\w+)\?")
RULE = re.compile(r"(?:(?:Each|Every) (\w+) is|([A-Z][a-z]+)es are) (not )?(?:an? )?(\w+)\.")
MEMBER = re.compile(r"(\w+) is an? (\w+pus)\.")
CLAIM = re.compile(r"True or false: (\w+) is (not )?(\w+)\.")


@pytest.fixture(scope="module")
def many():
    return {name: module.generate(config, "train", MANY, 0) for name, (module, config) in MADE.items()}


# --- oracles: from words alone -------------------------------------------------------------------------


def read_prosqa(question):
    """The graph, who is asked about, and the two choices. A sentence of another shape fails."""
    *sentences, asked = re.findall(r"[^.?]+[.?]", question)
    graph = defaultdict(set)
    for sentence in sentences:
        every, subject, noun = FACT.fullmatch(sentence.strip()).groups()
        assert bool(every) == subject.islower()
        assert noun not in graph[subject], "stated twice"
        graph[subject].add(noun)
    return graph, CHOICE.fullmatch(asked.strip()).groups()


def all_paths(graph, start, goal):
    """Every path, by trying all: brute force on purpose."""
    if start == goal:
        return [[goal]]
    return [[start, *path] for child in graph.get(start, ()) for path in all_paths(graph, child, goal)]


def read_prontoqa(question):
    """Rules (noun, negated, what), the nouns that the entity is said to be, and the claim."""
    context, mark, _ = question.partition("True or false: ")
    who, negated, what = CLAIM.fullmatch(question[len(context) :]).groups()
    rules, members = [], []
    for sentence in re.findall(r"[^.]+\.", context):
        sentence = sentence.strip()
        if sentence.startswith(f"{who} is "):
            name, noun = MEMBER.fullmatch(sentence).groups()
            members.append(noun)
        else:
            rules.append(read_rule(sentence))
    assert mark
    return rules, members, (who, bool(negated), what)


def read_rule(sentence):
    singular, plural, negated, what = RULE.fullmatch(sentence).groups()
    return (singular or plural.lower(), bool(negated), what.removesuffix("es") if "puses" in what else what)


def deduced(rules, members):
    """All that follows of the entity: (negated, what), by applying every rule until nothing is new."""
    known = {(False, noun) for noun in members}
    while True:
        new = {(negated, what) for noun, negated, what in rules if (False, noun) in known} - known
        if not new:
            return known
        known |= new


# --- the answer follows, the chain is one --------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    nodes=st.integers(12, 40),
    parents=st.floats(1.0, 2.5),
    split=st.sampled_from(SPLITS),
    seed=st.integers(0, 2**40),
)
def test_prosqa_answers_follow_by_search_and_the_other_choice_does_not(nodes, parents, split, seed) -> None:
    config = ProsqaConfig(nodes=nodes, parents=parents, hops=(2, 6))
    for example in prosqa.generate(config, split, 4, seed):
        graph, (who, *choices) = read_prosqa(example.question)
        paths = {choice: all_paths(graph, who, choice) for choice in choices}
        [right] = [choice for choice in choices if paths[choice]]
        assert example.answer == f"{who} is a {right}."
        shortest = min(len(path) for path in paths[right])
        said = [FACT.fullmatch(step).groups() for step in example.steps]
        path = [who, *(noun for _, _, noun in said)]
        assert path in paths[right]
        assert len(path) == shortest
        assert 2 <= len(example.steps) <= 6
        assert all(f" {step} " in f" {example.question} " for step in example.steps)


@settings(deadline=None, max_examples=40)
@given(hops=st.integers(1, 6), split=st.sampled_from(SPLITS), seed=st.integers(0, 2**40))
def test_prontoqa_answers_follow_by_deduction_and_their_opposite_does_not(hops, split, seed) -> None:
    for example in prontoqa.generate(ProntoqaConfig(hops=hops), split, 6, seed):
        rules, members, (who, negated, what) = read_prontoqa(example.question)
        known = deduced(rules, members)
        holds = (negated, what) in known
        assert holds != ((not negated, what) in known)
        assert example.answer == str(holds)
        # Every noun of the chain has a second parent, the entity a second noun, and somebody has the opposite.
        assert len(members) == 2
        assert len([rule for rule in rules if rule[2] == what]) == 2
        assert len(rules) == 4 * hops + 3
        check_prontoqa_chain(example, rules, members, who, hops)
        final = example.steps[-1]
        assert final == f"{who} is {'not ' if (not holds) != negated else ''}{what}."


def check_prontoqa_chain(example, rules, members, who, hops):
    """Each step states what is known and a rule of the question; it makes known what the next one starts from."""
    noun = None
    assert len(example.steps) == hops + 1
    for step in example.steps[:-1]:
        member, rule = (part.strip() for part in re.findall(r"[^.]+\.", step))
        name, is_a = MEMBER.fullmatch(member).groups()
        assert name == who
        assert is_a in members if noun is None else is_a == noun
        assert f" {rule} " in f" {example.question} "
        subject, _, noun = read_rule(rule)
        assert subject == is_a
    # No shorter way: from the entity's nouns, the property is that many rules away.
    distance = dict.fromkeys(members, 0)
    for _ in rules:
        for subject, negated, what in rules:
            if subject in distance and not negated:
                distance[what] = min(distance.get(what, 99), distance[subject] + 1)
    assert distance[is_a] == hops - 1


def test_prontoqa_of_several_lengths_has_all_of_them_equally_often() -> None:
    config = ProntoqaConfig(hops=[2, 4])  # as YAML gives it
    assert config.hops == (2, 4)
    counts = Counter(len(example.steps) - 1 for example in prontoqa.generate(config, "train", 600, 0))
    assert set(counts) == {2, 3, 4}
    # 600 draws of one in three: 200 with a standard deviation of 11.5.
    assert max(abs(n - 200) for n in counts.values()) < 50


def test_prontoqa_of_one_length_written_as_a_range_has_that_length() -> None:
    examples = prontoqa.generate(ProntoqaConfig(hops=(3, 3)), "train", 20, 0)
    assert {len(example.steps) for example in examples} == {4}


@pytest.mark.parametrize("name", MADE)
def test_the_judge_takes_the_answer_and_no_other(name, many) -> None:
    for example in many[name][:200]:
        if name == "prosqa-made":
            who, *choices = CHOICE.search(example.question).groups()
            wrong = next(f"{who} is a {choice}." for choice in choices if choice not in example.answer)
        else:
            wrong = "False" if example.answer == "True" else "True"
        for said in (example.answer, f" {example.answer} "):
            assert answers.judge(said, example.answer, example.answer_type).correct
        assert not answers.judge(wrong, example.answer, example.answer_type).correct


# --- rows and splits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MADE)
def test_a_row_is_a_function_of_seed_and_index(name) -> None:
    module, config = MADE[name]
    rows = module.generate(config, "train", 30, 5)
    assert module.generate(config, "train", 7, 5) == rows[:7]
    assert [row.id for row in rows[:2]] == [f"{name}/train/0", f"{name}/train/1"]
    others = module.generate(config, "train", 30, 6)
    assert not {row.question for row in rows} & {row.question for row in others}


@settings(deadline=None, max_examples=20)
@given(
    name=st.sampled_from(sorted(MADE)),
    splits=st.permutations(SPLITS),
    seeds=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_splits_share_no_question_whatever_the_seeds(name, splits, seeds) -> None:
    module, config = MADE[name]
    one = {facts_of(row.question) for row in module.generate(config, splits[0], 30, seeds[0])}
    other = {facts_of(row.question) for row in module.generate(config, splits[1], 30, seeds[1])}
    assert len(one) == len(other) == 30
    assert not one & other


def facts_of(question):
    return frozenset(part.strip() for part in re.findall(r"[^.?]+[.?]", question))


def test_a_problem_stays_in_its_split_whichever_way_it_is_told() -> None:
    facts = ["Bob > lempus", "lempus > impus", "Bob: impus yumpus"]
    told = {logic.split_of(order) for order in (facts, facts[::-1], [facts[1], facts[0], facts[2]])}
    assert len(told) == 1
    # A few facts, told many times: all three splits occur, one in ten each for the small ones.
    shares = Counter(logic.split_of([f"fact {n}"]) for n in range(10_000))
    assert shares["test"] == pytest.approx(1_000, abs=120)
    assert shares["validation"] == pytest.approx(1_000, abs=120)


@pytest.mark.parametrize("seeds", [(0, 1, 2), (3, 3, 3)])
def test_a_small_space_drawn_many_times_over_still_has_disjoint_splits(seeds) -> None:
    def draw(dice):
        # A hundred problems in all, so that an overlap could not hide.
        number = str(dice.pick(range(100)))
        return logic.Problem(f"{dice.pick(('Is', 'Was'))} it {number}?", (), number, (number,))

    asked = []
    for split, seed in zip(SPLITS, seeds, strict=True):
        rows = logic.generate("toy", draw, "text", split, 1_500, seed, frozenset())
        asked.append({row.answer for row in rows})
    train, validation, test = asked
    assert len(train | validation | test) == len(train) + len(validation) + len(test) == 100


@pytest.mark.parametrize("name", MADE)
def test_questions_are_distinct(name, many) -> None:
    assert len({row.question for row in many[name]}) == MANY


# --- nothing but the facts tells the answer ------------------------------------------------------------


def share(hits):
    hits = list(hits)
    return sum(hits) / len(hits)


def test_prosqa_is_at_chance_by_position_and_by_frequency(many) -> None:
    first, mentions, earlier, most_frequent = [], [], [], Counter()
    for row in many["prosqa-made"]:
        _, left, right = CHOICE.search(row.question).groups()
        answer = row.answer.split()[-1].rstrip(".")
        wrong = right if left == answer else left
        first.append(left == answer)
        words = re.findall(r"\w+", row.question.rpartition(". Is ")[0])
        counts = words.count(answer) - words.count(wrong)
        mentions.append(0.5 if counts == 0 else float(counts > 0))
        earlier.append(words.index(answer) < words.index(wrong))
        most_frequent[answer] += 1
    # Standard error 0.011 each.
    assert share(first) == pytest.approx(0.5, abs=0.04)
    assert share(earlier) == pytest.approx(0.5, abs=0.04)
    assert set(mentions) == {0.5}
    assert most_frequent.most_common(1)[0][1] < 0.02 * MANY


def test_prosqa_without_balance_has_the_shortcut_of_the_published_rows() -> None:
    # 0.66 over the 800 published rows; ties count as half.
    rarer = []
    for row in prosqa.generate(ProsqaConfig(balanced=False), "train", 1_000, 0):
        answer = row.answer.split()[-1].rstrip(".")
        counts = {
            choice: row.question.count(f" {choice}.") for choice in CHOICE.search(row.question).groups()[1:]
        }
        wrong = next(count for choice, count in counts.items() if choice != answer)
        rarer.append(0.5 if counts[answer] == wrong else float(counts[answer] < wrong))
    assert share(rarer) == pytest.approx(0.66, abs=0.06)


def test_prontoqa_is_at_chance_by_majority_and_by_the_word_not(many) -> None:
    rows = many["prontoqa-made"]
    true = [row.answer == "True" for row in rows]
    claimed = [" is not " not in row.question.rpartition("True or false: ")[2] for row in rows]
    chain_first, contrary_last = [], []
    for row, answer in zip(rows, true, strict=True):
        rules, members, (_, negated, what) = read_prontoqa(row.question)
        of_property = [rule for rule in rules if rule[2] == what]
        chain_first.append((of_property[0][1] == negated) == answer)
        contrary_last.append(members[0] in row.steps[0])
    assert share(true) == pytest.approx(0.5, abs=0.04)
    # The published generator asks for negated properties a little less often: 0.53 by this rule.
    assert share(a == b for a, b in zip(true, claimed, strict=True)) == pytest.approx(0.53, abs=0.04)
    assert share(chain_first) == pytest.approx(0.5, abs=0.04)
    assert share(contrary_last) == pytest.approx(0.5, abs=0.04)


# --- as the published rows -----------------------------------------------------------------------------


def test_prosqa_rows_have_the_published_sizes(many) -> None:
    """Means over the 800 published rows: 22.8 nodes, 36.0 facts, 3.77 steps, 0.56 entities beside the two."""
    nodes, facts, steps, entities = [], [], [], []
    for row in many["prosqa-made"]:
        graph, _ = read_prosqa(row.question)
        words = set(graph).union(*graph.values())
        nodes.append(len(words))
        facts.append(sum(len(nouns) for nouns in graph.values()))
        steps.append(len(row.steps))
        entities.append(sum(word[0].isupper() for word in words) - 2)
    assert share(nodes) == pytest.approx(22.8, abs=0.3)
    assert share(facts) == pytest.approx(36.0, abs=0.6)
    assert share(steps) == pytest.approx(3.77, abs=0.1)
    assert share(entities) == pytest.approx(0.56, abs=0.1)


def test_prontoqa_rows_have_the_published_sizes(many) -> None:
    for row in many["prontoqa-made"][:200]:
        assert row.question.count(". ") == 25
        assert len(row.steps) == 6
        assert len(set(re.findall(r"[a-z]+pus(?=es\b|\b)", row.question.lower()))) == 14


FOLDER = os.environ.get(catalogue.DATA_DIR_VARIABLE)


def published(name):
    under = catalogue.folder(None)
    splits = [] if under is None else ["validation", "test"]
    plans = sources.SOURCES[name].splits
    found = [split for split in splits if catalogue.present(plans[split], under) is not None]
    return [row for split in found for row in sources.load(name, split)]


@pytest.mark.skipif(FOLDER is None, reason="COLAR_DATA_DIR names no folder of published rows")
@pytest.mark.parametrize("name", ["prosqa", "prontoqa"])
def test_no_row_is_a_published_one_and_their_nouns_are_among_ours(name, many) -> None:
    rows = published(name)
    if not rows:
        pytest.skip(f"no published {name} under {FOLDER}")
    made = {row.question for row in many[f"{name}-made"]}
    assert not made & {row.question for row in rows}
    nouns = {noun for row in rows for noun in re.findall(r"[a-z]+pus(?=es\b|\b)", row.question.lower())}
    assert nouns <= set(logic.NOUNS)


@pytest.mark.parametrize("name", MADE)
def test_a_held_out_question_is_never_made(name, tmp_path: Path) -> None:
    before = sources.load(name, "train", limit=4, data_dir=tmp_path)
    file = tmp_path / name.removesuffix("-made") / f"{name.removesuffix('-made')}_test.json"
    file.parent.mkdir()
    row = {key: value for key, value in before[2].as_row().items() if key not in ("id", "answer_type")}
    file.write_text(json.dumps([row]))
    after = sources.load(name, "train", limit=4, data_dir=tmp_path)
    assert after[:2] + after[3:] == before[:2] + before[3:]
    assert after[2].question != before[2].question
    assert after[2].id == before[2].id
    hashes = frozenset({formats.question_hash(before[0].question)})
    module, config = MADE[name]
    assert module.generate(config, "train", 1, 0, avoid=hashes)[0].question != before[0].question


# --- options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("prosqa-made", {"nodes": 5}, "nodes must be a whole number, from 12 to 60, got 5"),
        ("prosqa-made", {"nodes": 20.5}, "nodes must be a whole number"),
        ("prosqa-made", {"parents": 0}, "parents must be a number, from 0.5 to 4, got 0"),
        ("prosqa-made", {"hops": 3}, r"hops must be \[fewest, most\]"),
        ("prosqa-made", {"hops": [4, 3]}, r"hops must be \[fewest, most\]"),
        ("prosqa-made", {"balanced": 1}, "balanced must be true or false, got 1"),
        ("prosqa-made", {"hop": [3, 4]}, "unknown prosqa-made option 'hop', did you mean 'hops'"),
        ("prosqa-made", {"nodes": 12, "hops": [40, 50]}, "no problem found .* widen the source's options"),
        ("prontoqa-made", {"hops": 7}, "hops must be a whole number, from 1 to 6, got 7"),
        ("prontoqa-made", {"hops": "five"}, "hops must be a whole number, from 1 to 6"),
        ("prontoqa-made", {"hops": [4, 3]}, r"hops must be \[fewest, most\]"),
        ("prontoqa-made", {"hops": [1, 7]}, "hops: most must be a whole number, from 1 to 6, got 7"),
        ("prontoqa-made", {"nodes": 3}, "unknown prontoqa-made option 'nodes'; allowed: hops"),
    ],
)
def test_wrong_options_are_named(name, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        sources.load(name, "train", limit=1, options=options)


def test_wrong_splits_and_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="split must be one of train, validation, test, got 'dev'"):
        prosqa.generate(ProsqaConfig(), "dev", 1, 0)
    with pytest.raises(ValueError, match="n must be a whole number, 0 or more, got -1"):
        prontoqa.generate(ProntoqaConfig(), "train", -1, 0)


def test_words_are_distinct_and_of_one_kind() -> None:
    assert len(set(logic.NOUNS)) == len(logic.NOUNS) >= 300
    assert len(set(logic.NAMES)) == len(logic.NAMES)
    properties = [word for family in prontoqa.FAMILIES for word in family]
    assert len(set(properties)) == len(properties)
    assert not set(properties) & set(logic.NOUNS)
    assert all(re.fullmatch(r"[a-z]+pus", noun) for noun in logic.NOUNS)
