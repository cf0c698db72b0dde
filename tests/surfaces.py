"""The surfaces of `test_fuzz.py` that are files: recipes, rows, checkpoints. Each draws cases, which are data, and runs them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from random import Random
from typing import Any

import huggingface_hub.constants
import yaml
from families import EXAMPLES, backbone
from fuzzing import ODD, changed, command, damaged, failure, odd
from serving import DECODING, QUESTION, colar_model

import colar
from colar import recipe, yaml_settings
from colar.data import sources
from colar.data.example import collapsed
from colar.methods import pretrained, registry
from colar.model import backbones, checkpoint
from colar.model.latent_lm import LatentLM, LoraSettings
from colar.training.grpo.config import GrpoConfig

SHORT = ["--max_latents", "2", "--max_completion_length", "2"]
METHODS = ("cot", "no_cot", "colar", "icot", "coconut", "distill", "pause", "tokenskip", "ruplar", "sim_cot")


class Surface(ABC):
    """Something that a user gives."""

    seconds = 5.0
    """What a case may take."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # A name that no folder has would be asked of the Hub.
        self.online = huggingface_hub.constants.HF_HUB_OFFLINE
        huggingface_hub.constants.HF_HUB_OFFLINE = True

    @abstractmethod
    def draw(self, random: Random) -> Any:
        """A case."""

    @abstractmethod
    def run(self, case: Any) -> None:
        """Give the case to colar."""

    def failure(self, case: Any) -> str | None:
        """What is wrong with how a case ends."""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return failure(lambda: self.run(case), self.seconds)

    def close(self) -> None:
        huggingface_hub.constants.HF_HUB_OFFLINE = self.online


def checkpoints(folder: Path) -> dict[str, Path]:
    """Tiny ones: all weights, and an adapter with a sequential head."""
    lm, method = colar_model()
    full = pretrained.save(lm, method, folder / "full", {"seed": 0, "label": ""}, "# card\n")
    made = backbone("qwen2")
    made.lm.save_pretrained(folder / "backbone")
    made.tokenizer.save_pretrained(folder / "backbone")
    loaded = backbones.load(str(folder / "backbone"))
    lm = LatentLM.from_backbone(loaded, lora=LoraSettings(r=2))
    method = registry.build("sequential")
    pretrained.attach(lm, method, seed=1)
    method.prepare(lm, EXAMPLES)
    adapter = pretrained.save(lm, method, folder / "adapter", {"seed": 0, "label": ""}, "# card\n")
    return {"full": full, "adapter": adapter}


def alike(value: Any, default: Any) -> bool:
    """Whether a value is of the kind that a key takes whose default this is: null may stand for a number or a text."""
    if default is None:
        return isinstance(value, int | float | str)
    if isinstance(default, int | float) and not isinstance(default, bool):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, type(default)) or (isinstance(default, tuple) and isinstance(value, list))


class Recipe(Surface):
    """One key of a recipe; where it is accepted, the run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.start = checkpoints(folder)["full"]
        self.defaults = {
            key: default
            for key, default, _ in yaml_settings.keys(recipe.Recipe)
            if not key.startswith("grpo")
        }
        self.keys = list(self.defaults)

    def draw(self, random: Random) -> Any:
        """Method, whether it is reinforced, a key and its value: often one of the kind that the key takes."""
        name = random.choice(METHODS)
        grpo = random.random() < 0.15
        if random.random() < 0.3:
            config = registry.METHODS[name].Config()
            field = random.choice([each.name for each in dataclasses.fields(config)] or ["name"])
            key, default = f"method.{field}", getattr(config, field, name)
        elif grpo and random.random() < 0.6:
            field = random.choice([each.name for each in dataclasses.fields(GrpoConfig)])
            key, default = f"grpo.{field}", getattr(GrpoConfig(), field)
        else:
            key = random.choice(self.keys)
            default = self.defaults.get(key)
        value = odd(random)
        if random.random() < 0.6:
            value = random.choice([each for each in ODD if alike(each, default)] or [value])
        return ["colar" if grpo else name, grpo, key, value]

    def run(self, case: Any) -> None:
        name, grpo, key, value = case
        run = self.folder / "run"
        made: dict[str, Any] = {
            "output": str(run),
            "model": {"backbone": "tiny"},
            "data": {"source": "arithmetic", "train_size": 4, "validation_size": 2},
            "method": {"name": name},
            "training": {"num_train_epochs": 1, "per_device_train_batch_size": 2},
            "validation": {"page_size": 0, "limits": {"max_latents": 2, "max_completion_length": 2}},
        }
        if grpo:
            made["model"] = {"init_from": str(self.start)}
            made["grpo"] = {"num_generations": 2}
        path = self.folder / "recipe.yaml"
        try:
            text = yaml.safe_dump(with_values(made, {key: value}))
        except RecursionError:  # there is no such file
            return
        path.write_text(text)
        found = recipe.load(path)
        if key != "output":
            shutil.rmtree(run, ignore_errors=True)
            recipe.run(found, resume=False)


ROWS: dict[str, Any] = {
    "own.jsonl": {"id": "a", "question": "1 + 2?", "steps": ["<<1+2=3>>"], "answer": "3", "answer_type": "number"},
    "own.json": {"question": "1 + 2?", "steps": ["<<1+2=3>>", "x"], "answer": 3},
    "gsm8k/test.jsonl": {"question": "1 + 2?", "answer": "It is <<1+2=3>>3.\n#### 3"},
    "gsm_hard/gsmhardv2.jsonl": {"input": "1 + 2?", "target": 3.5},
    "svamp/SVAMP.json": {"ID": "a", "Body": "One.", "Question": "Two?", "Answer": 3.0},
    "multiarith/MultiArith.json": {"sQuestion": "1 + 2?", "lSolutions": [3.0]},
    "math500/test500.jsonl": {"problem": "x?", "solution": "It is\n\n\\boxed{3}", "answer": "3", "unique_id": "test/a/1.json"},
    "math/test.parquet": {"problem": "x?", "solution": "It is\n\n\\boxed{3}"},
    "prosqa/prosqa_test.json": {"question": "Is it?", "steps": ["a"], "answer": "yes"},
    "gsm8k_aug/test.txt": "1+2?||<<1+2=3>> #### 3",
    "questions.jsonl": {"id": "a", "question": "1 + 2?", "answer": "3"},
}  # fmt: skip
RECORD = {
    "model": "m", "method": "cot", "label": "", "dataset": "sums", "params": {}, "seed": 0, "decoding": "greedy",
    "train_seed": 0, "id": "0", "completion": "7", "parsed": "7", "correct": True, "truncated": False, "length": 4,
    "forward_passes": 9, "seconds": 0.5,
}  # fmt: skip
"""A line of records.jsonl."""
NAMED = {
    "gsm8k": "gsm8k", "gsm_hard": "gsm-hard", "svamp": "svamp", "multiarith": "multiarith", "math500": "math-500", "math": "math",
    "prosqa": "prosqa", "gsm8k_aug": "gsm8k-aug",
}  # fmt: skip


class Rows(Surface):
    """A row of a data file, in every format, and of what commands write and read again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.model = checkpoints(folder)["full"]

    def draw(self, random: Random) -> Any:
        """The file's name, and what is in it."""
        name = random.choice(sorted(ROWS))
        row = ROWS[name]
        rows = [row] * random.choice([1, 1, 2])
        if name.endswith(".parquet"):
            return [name, "", changed(random, rows)]
        if name.endswith(".txt"):
            text = "\n".join(rows) + "\n"
        elif name.endswith(".json"):
            text = json.dumps(changed(random, rows))
        else:
            text = "".join(json.dumps(each) + "\n" for each in [*rows[1:], changed(random, row)])
        content = text.encode()
        if name.endswith(".txt") or random.random() < 0.25:
            content = damaged(random, content)
        return [name, content.decode("latin-1"), None]

    def run(self, case: Any) -> None:
        name, text, table = case
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        if table is None:
            path.write_bytes(text.encode("latin-1"))
        else:
            import pyarrow
            from pyarrow import parquet

            try:
                parquet.write_table(pyarrow.Table.from_pylist(table), path)
            except Exception:  # no such table can be written
                return
        if name == "questions.jsonl":
            command(["generate", str(self.model), "--input", str(path), *SHORT])
        elif name.startswith("own."):
            found = sources.load_examples(str(path), "train")
            command(["data", "show", str(path)])
            lm_rows = [collapsed(example.question) for example in found]
            assert lm_rows
        else:
            sources.load_examples(NAMED[path.parent.name], "test", data_dir=self.folder)


def with_values(made: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """`made`, whose dotted keys have these values."""
    for key, value in values.items():
        *sections, last = key.split(".")
        place = made
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return made


class Folder(Surface):
    """A checkpoint, one of whose files is gone, damaged, or has another value somewhere."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.made = checkpoints(folder)
        self.files = {name: sorted(path.name for path in made.iterdir()) for name, made in self.made.items()}

    def draw(self, random: Random) -> Any:
        """The checkpoint, the file, its content (None: gone; a dict: new values of its keys), and what is done with it."""
        name = random.choice(sorted(self.made))
        file = random.choice(self.files[name])
        content = (self.made[name] / file).read_bytes()
        kind = random.random()
        use = random.choice(["load", "load", "load", "export", "merge", "train"])
        if kind < 0.1:
            return [name, file, None, use]
        if file.endswith(".json") and kind < 0.7:
            text = json.dumps(changed(random, json.loads(content)))
            return [name, file, text, use]
        return [name, file, damaged(random, content).decode("latin-1"), use]

    def run(self, case: Any) -> None:
        name, file, text, use = case
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.made[name], copy)
        (copy / file).unlink()
        if isinstance(text, dict):
            text = json.dumps(with_values(json.loads((self.made[name] / file).read_text("utf-8")), text))
        if text is not None:
            (copy / file).write_bytes(text.encode("latin-1"))
        target = self.folder / "target"
        shutil.rmtree(target, ignore_errors=True)
        if use == "export":
            checkpoint.convert(copy, target, "bfloat16")
        elif use == "merge":
            pretrained.merge(copy, target, "float32")
        elif use == "train":
            method = registry.build("sequential" if name == "adapter" else "colar")
            pretrained.load_for_training(
                copy, method, LoraSettings(r=2) if name == "adapter" else None, "float32", 0
            )
        else:
            lm, method = colar.from_pretrained(copy)
            request = colar.Request("a", QUESTION, method.Params(), DECODING, keep_latents=True)
            list(colar.Engine(lm, method, 1).generate([request]))
