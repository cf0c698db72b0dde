"""The surfaces of `test_fuzz.py` that answer at once: the server, the package's public names, the commands; and all."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import yaml
from fuzzing import ODD_TEXTS, changed, command, damaged, odd
from serving import DECODING, QUESTION, colar_model, cot_model, running, sequential_model, serve_model
from surfaces import RECORD, SHORT, Folder, Recipe, Rows, Surface, checkpoints

import colar
from colar import cli, files


def chat_body() -> dict[str, Any]:
    return {
        "model": "colar", "messages": [{"role": "user", "content": QUESTION}], "n": 1, "stop": ["x"], "max_tokens": 4, "temperature": 0.5,
        "top_p": 0.9, "latent_temperature": 0.5, "seed": 1, "thinking_token_budget": 3, "reasoning_effort": "low", "stream": False,
        "stream_options": {"include_usage": True}, "include_reasoning": True, "return_thoughts": True, "logprobs": False, "top_logprobs": 0,
        "compression_factor": 2, "confidence_threshold": 0.5, "user": "u", "metadata": {"a": "b"}, "tools": [], "max_completion_tokens": 3,
        "frequency_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}, "service_tier": "auto",
    }  # fmt: skip


class Request(Surface):
    """A request to the server, any of whose fields is odd, or whose bytes are."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        models = {"colar": colar_model(), "sequential": sequential_model(), "cot": cot_model()}
        self.open = contextlib.ExitStack()
        self.live = self.open.enter_context(
            running(*(serve_model(name, model) for name, model in models.items()))
        )

    def draw(self, random: Random) -> Any:
        whole = chat_body()
        body = {name: whole[name] for name in whole if name in ("model", "messages") or random.random() < 0.4}
        body["model"] = random.choice(["colar", "sequential", "cot"])
        if random.random() < 0.2:
            body["stream"] = True
        if random.random() < 0.1:
            body[random.choice(sorted(whole))] = odd(random)
        body = changed(random, body)
        content = json.dumps(body).encode()
        if random.random() < 0.15:
            content = damaged(random, content)
        return content.decode("latin-1")

    def run(self, case: Any) -> None:
        connection = http.client.HTTPConnection(*self.live.address, timeout=20)
        try:
            connection.request(
                "POST", "/v1/chat/completions", case.encode("latin-1"), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        assert answer.status < 500, content
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert b"server_error" not in content, content
        else:
            found = json.loads(content)
            assert answer.status == 200 or found["error"]["message"], content

    def close(self) -> None:
        self.open.close()
        super().close()


class Python(Surface):
    """An argument of a public name of the package."""

    FIELDS: ClassVar = {
        "from_pretrained": ("path_or_id", "dtype", "backbone"),
        "save_pretrained": ("folder", "run"),
        "make_params": ("compression_factor", "confidence_threshold", "x"),
        "Request": ("question", "params", "decoding", "seed", "sample", "keep_latents", "id"),
        "Decoding": ("temperature", "top_p", "latent_temperature", "max_latents", "max_completion_length"),
        "Engine": ("max_batch", "token_budget", "max_waiting"),
        "Example": ("id", "question", "steps", "answer", "answer_type", "cluster"),
        "push_to_hub": ("folder", "repo_id"),
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = checkpoints(folder)["full"]
        self.models = [colar.from_pretrained(self.path), sequential_model(), cot_model()]

    def draw(self, random: Random) -> Any:
        name = random.choice(sorted(self.FIELDS))
        field = random.choice(self.FIELDS[name])
        value = odd(random)
        # Python itself says what is no path, or no text to write.
        while field in ("path_or_id", "folder", "backbone") and (
            not isinstance(value, str) or "\0" in value or "\ud800" in value
        ):
            value = odd(random)
        return [name, field, value, random.randrange(3)]

    def run(self, case: Any) -> None:
        name, field, value, model = case
        lm, method = self.models[model]
        given = {field: value}
        if name == "from_pretrained":
            colar.from_pretrained(**{"path_or_id": self.path, **given})
        elif name == "save_pretrained":
            colar.save_pretrained(lm, method, **{"folder": self.folder / "saved", "run": {}, **given})
        elif name == "make_params":
            colar.make_params(method, given)
        elif name == "Request":
            self.answer(lm, method, given, {})
        elif name == "Decoding":
            made = colar.Decoding(**{"max_latents": 2, "max_completion_length": 2, **given})
            self.answer(lm, method, {"decoding": made}, {})
        elif name == "Engine":
            self.answer(lm, method, {}, given)
        elif name == "Example":
            example = colar.Example(
                **{"id": "a", "question": "1+1?", "steps": ("<<1+1=2>>",), "answer": "2", **given}
            )
            method.encode(lm.template, example, Random(0), 0.0)
        else:
            colar.push_to_hub(**{"folder": self.path, "repo_id": "a/b", **given})

    def answer(self, lm: Any, method: Any, request: dict[str, Any], engine: dict[str, Any]) -> None:
        filled = {
            "id": "a",
            "question": QUESTION,
            "params": method.Params(),
            "decoding": DECODING,
            "keep_latents": True,
            **request,
        }
        list(colar.Engine(lm, method, **{"max_batch": 2, **engine}).generate([colar.Request(**filled)]))


class Command(Surface):
    """Options of a command, given texts that hardly anybody means."""

    seconds = 8.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        model = str(checkpoints(folder)["full"])
        records = folder / "records.jsonl"
        files.write_jsonl(records, [RECORD])
        made = {"output": str(folder / "run"), "data": {"train_size": 4, "validation_size": 2}, "training": {"num_train_epochs": 1},
                "validation": {"page_size": 0, "limits": {"max_latents": 2, "max_completion_length": 2}}}  # fmt: skip
        (folder / "recipe.yaml").write_text(yaml.safe_dump(made))
        out = ["--output", str(folder / "out")]
        self.base = {
            "train": [str(folder / "recipe.yaml")],
            "evaluate": [model, "--limit", "1", *SHORT, *out],
            "generate": [model, QUESTION, *SHORT],
            "serve": [model, "--port", "0"],
            "inspect": [
                model,
                "--limit",
                "1",
                *SHORT,
                "--output",
                str(folder / "page.json"),
            ],
            "report": [str(records), *out],
            "export": [model, str(folder / "exported")],
            "data list": [],
            "data show": ["arithmetic"],
            "data prepare": ["arithmetic", "--limit", "2", *out],
            "recipes list": [],
            "recipes copy": ["tiny/cot", str(folder / "copied")],
        }
        self.options = {name: self._options(name) for name in self.base}

    def _options(self, name: str) -> list[str]:
        found: argparse.ArgumentParser = cli.build_parser()
        for word in name.split():
            (commands,) = [each for each in found._actions if isinstance(each, argparse._SubParsersAction)]
            found = commands.choices[word]
        return [
            action.option_strings[0]
            for action in found._actions
            if action.option_strings and action.dest != "help"
        ]

    def draw(self, random: Random) -> Any:
        name = random.choice(sorted(self.base))
        words = list(self.base[name])
        for _ in range(random.choice([1, 1, 2])):
            if words and random.random() < 0.25:
                # Where outputs go stays: a folder is emptied, or filled.
                places = [i for i, word in enumerate(words) if "--output" not in words[max(0, i - 1) : i + 1]]
                words[random.choice(places)] = random.choice(ODD_TEXTS)
                continue
            options = self.options[name]
            if name in ("train", "plan"):
                options = [
                    *options,
                    "--model.backbone",
                    "--data.source",
                    "--training.learning_rate",
                    "--method",
                    "--x.y",
                    "--grpo",
                    "--model",
                ]
            if not options:
                words.append(random.choice(ODD_TEXTS))
                continue
            words += [random.choice(options), *random.choices(ODD_TEXTS, k=random.choice([0, 1, 1, 1, 2]))]
        return [*name.split(), *(word.replace(str(self.folder), "{folder}") for word in words)]

    def run(self, case: Any) -> None:
        command([word.replace("{folder}", str(self.folder)) for word in case])


SURFACES: dict[str, type[Surface]] = {
    "recipe": Recipe, "rows": Rows, "folder": Folder, "request": Request, "python": Python, "command": Command,
}  # fmt: skip
