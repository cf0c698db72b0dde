"""Pages keep what they promise: links lead somewhere, code blocks run, README's tree and answers are the real ones."""

import dataclasses
import gzip
import importlib.util
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from families import EXAMPLES, liven, publishable, tiny_lm
from script_files import module

import colar
from colar import recipe
from colar.engine import reference
from colar.engine.engine import Engine
from colar.engine.request import DECODINGS, Request
from colar.methods import pretrained, registry
from colar.methods.base import Batch

ROOT = Path(__file__).resolve().parent.parent
FOLDERS_OF_PAGES = (".", "docs", "lab", "lab/recipes/*", "results/*", "results/*/*", "checkpoints/*")
PAGES = []
for folder in FOLDERS_OF_PAGES:
    PAGES += sorted(ROOT.glob(f"{folder}/*.md"))
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
PICTURE = re.compile(r"(?:src|srcset|href)=\"(?!https?:)([^\"]+)\"")
MENTION = re.compile(
    r"\b(?:docs|scripts|lab/scripts|lab/reproduce|lab/benchmarks|lab|tests|results(?:/[\w.-]+)+)/[\w.-]+\.(?:md|py|sh)\b"
)
"""A file of this repository as comments, help and docstrings name it."""
ELSEWHERE = {"scripts/gsm_eval.py", "scripts/rejudge.py"}
"""Files of other repositories that are named here (PAL's evaluation of GSM-Hard), and a path of before in reports."""


def without_code(text):
    """A page without its code blocks, whose comments look like headings."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them: the second of two equal ones ends in -1."""
    seen = Counter()
    for heading in re.findall(r"^#+ +(.*?) *$", without_code(page.read_text()), flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        yield f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor
        seen[anchor] += 1


def blocks(page, language):
    """The code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


# Links


def test_there_are_pages():
    names = {str(path.relative_to(ROOT)) for path in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "docs/method.md", "results/toy/README.md"} <= names


def test_anchors_are_githubs(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# What c = 2 would take\n\n## `snap`, [a link](x.md)\n```\n# no heading\n```\n## Twice\n## Twice\n"
    )
    assert list(anchors(page)) == ["what-c--2-would-take", "snap-a-link", "twice", "twice-1"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page):
    text = without_code(page.read_text())
    for target in LINK.findall(text) + PICTURE.findall(text):
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert linked.resolve().is_relative_to(ROOT), f"{page.name} links out of the repository: {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}, which has no such heading"


def test_files_that_code_and_pages_name_exist():
    sources = [*PAGES, ROOT / "Makefile"]
    for pattern in (
        "src/**/*.py",
        "src/**/*.yaml",
        "scripts/*.py",
        "lab/**/*.py",
        "lab/**/*.sh",
        "lab/**/*.yaml",
    ):
        sources += ROOT.glob(pattern)
    named, missing = set(), []
    for source in sources:
        for name in MENTION.findall(source.read_text()):
            named.add(name)
            if name not in ELSEWHERE and not (ROOT / name).exists():
                missing.append(f"{source.relative_to(ROOT)} names {name}")
    assert len(named) > 20
    assert missing == []


def test_nobody_is_told_to_install_colar_by_its_name_from_an_index():
    """It is on none: who installs a package of that name installs another one's."""
    read = [*PAGES, *(ROOT / "src").rglob("*.py")]
    wrong = [str(path) for path in read if re.search(r"pip install [\"']?colar", path.read_text())]
    assert wrong == []


def test_every_manual_and_page_of_results_is_in_the_index_and_every_folder_of_records_in_its_page():
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(index.read_text())
    }
    wanted = {*ROOT.glob("docs/*.md"), *ROOT.glob("results/*/README.md")} - {index}
    assert wanted <= linked
    for report in ROOT.glob("results/*/*/report.json"):
        page = report.parent.parent / "README.md"
        assert f"`{report.parent.name}`" in page.read_text(), f"{page} does not say where {report} is from"


# README


def test_readmes_tree_has_each_room_and_its_job():
    [tree] = re.findall(
        r"^src/colar/ .*\n((?:  .*\n)+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE
    )
    rooms = dict(line.split(maxsplit=1) for line in tree.splitlines())
    package = ROOT / "src" / "colar"
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")} - {"colar/"}
    assert rooms.keys() == folders | {path.name for path in package.glob("*.py")} - {"__init__.py"}


def untrained_checkpoint(folder):
    """A CoLaR checkpoint of random weights that stop after a few thoughts."""
    lm, method = publishable(liven(tiny_lm("llama"))), registry.build("colar", {})
    lm.causal_lm.config.max_position_embeddings = 1024
    pretrained.attach(lm, method, 0)
    method.prepare(lm, EXAMPLES)
    return pretrained.save(lm, method, folder, {}, "a card")


def test_readmes_python_runs_on_a_checkpoint_of_that_name(tmp_path, monkeypatch, capsys):
    untrained_checkpoint(tmp_path / "runs" / "demo" / "sequential" / "best")
    monkeypatch.chdir(tmp_path)
    [code] = blocks(ROOT / "README.md", "python")
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert [re.sub(r"\d+ thoughts, answer.*", "", line) for line in printed] == [
        "c = 1: ",
        "c = 2: ",
        "c = 5: ",
    ]


def test_readmes_answers_are_those_of_the_demo():
    """The third test problem; every answer of the demo is among the committed records."""
    text = (ROOT / "README.md").read_text()
    shown = re.findall(r"^c = (\d): (\d+) thoughts, answer (\S+)$", text, flags=re.MULTILINE)
    assert len(shown) == 3
    expected = {}
    with gzip.open(ROOT / "results" / "toy" / "demo" / "records.jsonl.gz", "rt") as stream:
        for line in stream:
            record = json.loads(line)
            if (record["model"], record["decoding"], record["id"]) == (
                "sequential",
                "greedy",
                "arithmetic/test/2",
            ):
                expected[str(record["params"]["compression_factor"])] = (
                    str(record["length"]),
                    record["completion"],
                )
    assert {c: (length, answer) for c, length, answer in shown}.items() <= expected.items()


# Manuals


def test_the_python_of_the_engines_page_runs(tmp_path):
    lm, method = pretrained.load(untrained_checkpoint(tmp_path / "best"))
    [code] = blocks(ROOT / "docs" / "engine.md", "python")
    names = {"lm": lm, "method": method}
    exec(compile(code, "engine.md", "exec"), names)
    assert len(names["completions"]) == 1
    assert not names["engine"].busy


def test_the_python_of_the_usage_page_runs(tmp_path, monkeypatch):
    untrained_checkpoint(tmp_path / "runs" / "mine" / "best")
    monkeypatch.chdir(tmp_path)
    pushed = []
    monkeypatch.setattr(colar, "push_to_hub", lambda *args: pushed.append(args), raising=False)
    [code] = blocks(ROOT / "docs" / "usage.md", "python")
    exec(compile(code, "usage.md", "exec"), {})
    assert pushed == [("runs/mine", "me/mine")]


def test_the_picture_of_the_idea_is_drawn(tmp_path, monkeypatch):
    draw_idea = module("scripts/draw_idea.py")
    monkeypatch.setattr(sys, "argv", ["draw_idea.py", "--output", str(tmp_path)])
    draw_idea.main()
    for theme in ("light", "dark"):
        drawn = ElementTree.parse(tmp_path / f"idea-{theme}.svg").getroot()
        committed = ElementTree.parse(ROOT / "docs" / f"idea-{theme}.svg").getroot()
        assert drawn.get("viewBox") == committed.get("viewBox")
        assert len(list(drawn.iter())) > 100


# A new method


@pytest.fixture
def echo(tmp_path, monkeypatch):
    """The method of docs/add_a_method.md, in the registry."""
    [code] = blocks(ROOT / "docs" / "add_a_method.md", "python")
    path = tmp_path / "echo_method.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("echo_method", path)
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "echo_method", made)
    spec.loader.exec_module(made)
    monkeypatch.setitem(registry.METHODS, "echo", made.Echo)
    return made.Echo


LIMITED = {
    mode: dataclasses.replace(decoding, max_latents=8, max_completion_length=8)
    for mode, decoding in DECODINGS.items()
}


def ask(method, examples):
    return [
        Request(f"{mode}/{example.id}", example.question, method.Params(), decoding, i, keep_latents=True)
        for mode, decoding in LIMITED.items()
        for i, example in enumerate(examples)
    ]


def test_the_worked_example_learns_and_answers_as_the_reference_does(echo, tmp_path):
    [text] = blocks(ROOT / "docs" / "add_a_method.md", "yaml")
    path = tmp_path / "echo.yaml"
    path.write_text(text)
    small = ["--output", str(tmp_path / "run"), "--data.train_size", "64", "--data.validation_size", "8"]
    small += ["--training.logging_steps", "1", "--training.report_to", "none", "--validation.page_size", "0"]
    result = recipe.run(recipe.load(path, small))
    losses = [row["ce"] for row in result.history if "ce" in row]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 1

    lm, method = pretrained.load(result.best)
    assert isinstance(method, echo)
    requests = ask(method, EXAMPLES)
    for found, request in zip(Engine(lm, method, max_batch=3).generate(requests), requests, strict=True):
        expected = reference.complete(lm, method, request)
        assert (found.length, found.token_ids, found.reason) == (4, expected.token_ids, expected.reason)
        torch.testing.assert_close(found.latents, expected.latents)


def test_the_worked_example_keeps_the_rules_of_all_methods(echo):
    """A row's loss is its own, and what is thought is what training fed."""
    lm = tiny_lm("llama")
    method = registry.build("echo", {"n_thoughts": 3})
    pretrained.attach(lm, method, 3)
    rows = [method.encode(lm.template, example, Random(i), 0.0) for i, example in enumerate(EXAMPLES)]
    together = method.loss(lm, Batch.collate(rows))["ce"]
    alone = torch.stack([method.loss(lm, Batch.collate([row]))["ce"][0] for row in rows])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    batch = Batch.collate(rows)
    assert batch.n_latents.tolist() == [3] * len(EXAMPLES)
    fed = method.echoes(lm, lm.embed(batch.question_ids), batch.question_lengths)
    for i, request in enumerate(ask(method, EXAMPLES)[: len(EXAMPLES)]):
        torch.testing.assert_close(reference.complete(lm, method, request).latents, fed[i].detach())
    with pytest.raises(ValueError, match=r"method\.n_thoughts must be a whole number, 1 or more, got 0"):
        registry.build("echo", {"n_thoughts": 0})
