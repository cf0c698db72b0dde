"""What a user sees on stderr: our own lines, and none of the libraries' warnings and bars; `colar` starts quickly."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys

import families
import pytest

from colar import files, progress
from colar.methods import pretrained, registry
from colar.model import backbones
from colar.model.latent_lm import LatentLM, LoraSettings

RUN_ALL = """
import json, sys
from colar.cli import main

for number, arguments in enumerate(json.load(sys.stdin)):
    print(arguments[0], file=sys.stderr)
    if main(arguments) != 0:
        sys.exit(1)
    if number == 0:
        print(*sorted({name.split(".")[0] for name in sys.modules}))
        print("---", flush=True)
"""


def run(code, folder, text="", *arguments):
    """(stdout, stderr) of Python code in a process of its own, where nothing is imported yet."""
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        input=text,
        cwd=folder,
        capture_output=True,
        text=True,
        env=settings,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """(stdout, stderr) of most commands, one after another in one process; stdout has what the first one imported.

    The first one answers with a tiny model. Then GPT-2 under LoRA: its transposed linears are what peft has most to say
    about.
    """
    folder = tmp_path_factory.mktemp("commands")
    lm = LatentLM.from_backbone(backbones.load("tiny"), lora=LoraSettings(r=2))
    method = registry.build("colar")
    pretrained.attach(lm, method, 0)
    method.prepare(lm, [])
    pretrained.save(lm, method, folder / "best", {"seed": 0}, "# card\n")
    backbone = families.backbone("gpt2")
    backbone.lm.save_pretrained(folder / "gpt2")
    backbone.tokenizer.save_pretrained(folder / "gpt2")
    rows = [dataclasses.asdict(example) for example in families.EXAMPLES]
    files.write_jsonl(folder / "rows.jsonl", rows)
    files.write_jsonl(folder / "others.jsonl", [{**row, "id": f"other {row['id']}"} for row in rows])
    (folder / "recipe.yaml").write_text(
        "output: run\n"
        "model: {backbone: gpt2, lora: {r: 2, target_modules: all-linear}}\n"
        "data: {source: rows.jsonl, validation_source: others.jsonl, validation_size: 2}\n"
        "method: {name: colar}\n"
        "training: {per_device_train_batch_size: 3, max_steps: 2, report_to: none}\n"
        "validation: {page_size: 0, params: [{compression_factor: 2}], limits: {max_latents: 16, max_completion_length: 3}}\n"
    )
    short = ["--compression_factor", "2", "--max_latents", "4", "--max_completion_length", "3"]
    words = [
        ["generate", "best", "2 + 2?", "--max_latents", "3"],
        ["train", "recipe.yaml"],
        ["generate", "run/best", "2 + 2?", *short],
        ["evaluate", "run/best", "--data", "rows.jsonl", "--output", "evaluated", *short],
        ["inspect", "run/best", "--data", "rows.jsonl", "--output", "inspect.html", *short],
        ["report", "evaluated", "--output", "reported"],
        ["export", "run/best", "merged", "--merge"],
        ["generate", "merged", "2 + 2?", *short],
    ]
    return run(RUN_ALL, folder, json.dumps(words))


def test_no_command_shows_a_warning_or_a_bar_of_a_library(commands):
    _, said = commands
    assert "wrote reported/report.md" in said
    assert "wrote merged" in said
    for noise in ("Warning", "warn", "%|", "deprecated", "it/s"):
        assert noise not in said, said


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    """As in `colar recipes list | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "colar.cli", "recipes", "list"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


SLOW = ("datasets", "matplotlib", "pandas", "pyarrow", "scipy", "sklearn", "tensorboard")
"""Libraries that take a second or more to import, and that an answer does without."""

IMPORTED = """
import sys
from colar.cli import main

code = main(sys.argv[1:]) if sys.argv[1:] else 0
print(*sorted({name.split(".")[0] for name in sys.modules}), file=sys.stderr)
sys.exit(code)
"""


def test_the_command_line_itself_imports_nothing_heavy(tmp_path):
    _, imported = run(IMPORTED, tmp_path)
    assert not {"torch", "transformers", "peft", *SLOW} & set(imported.split())
    _, imported = run(IMPORTED, tmp_path, "", "recipes", "list")
    assert not {"torch", "transformers", "peft", *SLOW} & set(imported.split())


REFUSED = """
import sys
from colar.cli import main

assert main(sys.argv[1:]) == 2
print("imported:", *sorted({name.split(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def test_a_misspelt_recipe_is_found_before_anything_heavy_is_imported(tmp_path):
    _, said = run(REFUSED, tmp_path, "", "train", "tiny/collar")
    error, imported = said.split("imported:")
    assert "did you mean 'tiny/colar'?" in error
    assert not {"torch", "transformers", "peft", *SLOW} & set(imported.split())


WARNS = """
from colar.cli import main

main(["recipes", "list"])
from huggingface_hub.utils import logging

logger = logging.get_logger("huggingface_hub.utils._http")
logger.warning("Retrying in 1s [Retry 1/5].")
logger.error("an error")
"""


def test_the_retries_of_the_hubs_client_are_not_shown(tmp_path):
    _, said = run(WARNS, tmp_path)
    assert said == "an error\n"


def test_an_answer_imports_what_it_needs(commands):
    """The start is most of the time of `colar generate`: datasets and pictures have no part in it."""
    imported = set(commands[0].partition("---")[0].split())
    assert "torch" in imported
    # transformers takes these two where they are installed (lm-eval brings them).
    assert not set(SLOW) - {"scipy", "sklearn"} & imported


def test_a_bar_shows_names_as_they_are(monkeypatch):
    """Folders are called as users like: brackets in their names are no markup of the terminal."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.bar("evaluate [bold]", 2) as bar:
        bar.set_postfix_str("run[/x] {0}", refresh=False)
        bar.update()
        progress.say("a line of its own")
    shown = sys.stderr.getvalue()
    assert "evaluate [bold]" in shown
    assert "run[/x] {0}" in shown
    # The bar is wiped off its line before the text comes.
    assert re.search(r"\r +\ra line of its own\n", shown)


def test_a_log_file_gets_a_line_every_half_minute_with_the_time_left(monkeypatch, capsys):
    """A resumed run's time left is by its own pace: 250 of 300 updates in 25 minutes, and 10 of the last 50 now."""
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    bar = progress.bar("train", 300, done=250)
    for _ in range(10):
        now[0] += 6
        bar.update()
    bar.set_postfix_str("loss 0.5", refresh=False)
    now[0] += 6 * 30
    bar.update(30)
    progress.say("step 290: accuracy 0.5")
    # A bar beside another one: no line, as it takes less than half a minute.
    for _ in progress.track(range(3), "evaluate"):
        now[0] += 2
    now[0] += 2
    bar.update(10)
    bar.close()
    assert capsys.readouterr().err.splitlines() == [
        "train: 255/300, 04:30 left",
        "train: 260/300, 04:00 left",
        "train: 290/300, loss 0.5, 00:59 left",
        "step 290: accuracy 0.5",
        "train: 300/300, loss 0.5, 00:00 left",
    ]


def test_a_log_files_line_of_an_unknown_total_has_no_time_left(monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    bar = progress.bar("generate")
    for seconds in (31, 2):
        now[0] += seconds
        bar.update(5)
    bar.close()
    assert capsys.readouterr().err.splitlines() == ["generate: 5", "generate: 10"]


def test_processes_beside_the_main_one_show_no_bar(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with progress.bar("train", 2) as bar:
        bar.update()
        bar.set_postfix_str("loss 0.5", refresh=False)
        progress.say("step 1")
    assert capsys.readouterr().err == ""
