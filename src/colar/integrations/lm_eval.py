"""lm-evaluation-harness: the model `colar`, which runs its tasks on a checkpoint.

    colar lm-eval run --model colar --model_args pretrained=runs/demo/sequential/best,compression_factor=2 \\
        --tasks colar_svamp

All questions of a run go to one engine, in one list, because requests can join and leave its batch at any step.
lm-eval's context is the question, unchanged; the text that the model generates after its thoughts is the answer, cut
before the first of the task's stop texts. A request's draws depend on the seed and its document's id, as in
`colar evaluate`.

A model that thinks in latents has no likelihood of a text, so tasks that ask for one are rejected, by name.
lm-eval reads the entry point `lm_eval.models` from the version after 0.4.13 on; `register` replaces it in older ones.
"""

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

try:
    import datasets
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import model_registry
    from lm_eval.models.utils import postprocess_generated_text
except ImportError as error:
    raise ValueError(
        "lm-evaluation-harness is not installed: from your clone of colar, pip install '.[lm-eval]'"
    ) from error

from colar.checks import check_known
from colar.data import sources
from colar.data.judge import verdict_by_type
from colar.engine.request import DECODINGS, Decoding, Request, decoding_of
from colar.evaluation.evaluate import answer_all
from colar.methods import pretrained as checkpoints
from colar.methods import registry
from colar.ops import devices
from colar.ops.noise import seed_from

TASKS = Path(__file__).parent / "tasks"
LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks use for the maximum answer length; the first that is given counts, as in lm-eval's own models."""
DRAWING_KEYS = ("temperature", "top_p", "latent_temperature")
GENERATION_KEYS = ("until", "do_sample", *DRAWING_KEYS, "max_latents", *LENGTH_KEYS)
TURNS = "colar_context"
"""The column of our documents with the turns before the question, as JSON; "" where there are none."""
COMMANDS = ("run", "ls", "validate")
"""Commands of lm-eval's command line; the default is `run`."""


class ColarLM(LM):  # type: ignore[misc]
    """A checkpoint as lm-eval's model.

    `pretrained` is a folder or Hub id. `max_latents` and `max_gen_toks` are the limits if a task sets none;
    by default the checkpoint's own.
    `batch_size` rows run at a time ("auto": `max_batch_size`, else 256 on a CUDA GPU, 32 on others). `weights` int8 or
    int4 quantises linear layers. All other arguments are the method's per-request values (`compression_factor`, ...).
    ValueError names what is wrong.
    """

    def __init__(
        self,
        pretrained: str,
        dtype: str | None = None,
        backbone: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_latents: int | None = None,
        max_gen_toks: int | None = None,
        seed: int = 0,
        weights: str | None = None,
        **params: Any,
    ) -> None:
        super().__init__()
        # A folder may be called 2024, which lm-eval reads as a number.
        self.lm, self.method = checkpoints.load_for_inference(
            str(pretrained), dtype, backbone, device_for(device), weights
        )
        self.params = registry.make_params(self.method, params)
        self.decoding = decoding_of(self.method, max_latents=max_latents, max_completion_length=max_gen_toks)
        self.batch_size = rows(batch_size, max_batch_size or devices.requests_at_once(self.lm.device))
        self.seed = seed

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Reject lm-eval's cache: its keys do not name the checkpoint."""
        raise ValueError(
            "model colar takes no --use_cache, which would answer with what another checkpoint said: leave it out"
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers, in order, each cut before the first stop text. All requests are checked before any runs."""
        engine_requests = []
        stops = []
        repeats: Counter[tuple[str, int]] = Counter()
        for instance in requests:
            question, generation_kwargs = instance.args
            name = str(own_value(instance, "id") or f"{instance.task_name}/{instance.doc_id}")
            # lm-eval sends a document `repeats` times, and each is a sample of its own. They are counted by task and
            # `doc_id`, because ids may recur in other tasks or a user's file, whose requests must change no draw.
            document = (instance.task_name, instance.doc_id)
            sample = repeats[document]
            repeats[document] += 1
            decoding = decoding_of_task(generation_kwargs, self.decoding)
            seed = seed_from(self.seed, name)
            turns = tuple((role, text) for role, text in json.loads(own_value(instance, TURNS) or "[]"))
            engine_requests.append(
                Request(name, question, self.params, decoding, seed, sample, context=turns)
            )
            stops.append(generation_kwargs.get("until"))

        batch_size = min(self.batch_size, max(1, len(engine_requests)))
        completions = answer_all(self.lm, self.method, engine_requests, batch_size, "generate")
        # The engine has no stop texts: an answer is generated in full and cut afterwards.
        return [
            postprocess_generated_text(completion.text, until, think_end_token=None)
            for completion, until in zip(completions, stops, strict=True)
        ]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> Any:
        """Reject the requests: ValueError names their tasks."""
        tasks = sorted({str(instance.task_name) for instance in requests})
        raise ValueError(
            f"model colar cannot answer {', '.join(tasks)}: they ask for the likelihood of a text (loglikelihood), and "
            "a chain of latents leaves no such number; choose tasks with output_type generate_until"
        )

    loglikelihood_rolling = loglikelihood

    @property
    def tokenizer_name(self) -> str:
        """Reject --apply_chat_template, the only option for which lm-eval reads this name."""
        raise ValueError(
            "model colar takes no --apply_chat_template: a checkpoint's own template is always applied, so leave it out"
        )


def device_for(device: str | None) -> str:
    """The device to compute on. lm-eval passes "cuda:0" by default, even without a GPU."""
    if torch.cuda.is_available():
        return device or "cuda"
    return "cpu" if device is None or device.startswith("cuda") else device


def rows(batch_size: int | str | None, most: int) -> int:
    """Batch size from lm-eval's option; `most` where it is "auto"."""
    # lm-eval also has "auto:N" (measure the size anew N times): nothing is measured here.
    if batch_size is None or str(batch_size).startswith("auto"):
        return most
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
        raise ValueError(f"batch_size must be auto or a whole number, 1 or more, got {batch_size!r}")
    return int(batch_size)


def own_value(instance: Instance, column: str) -> Any:
    """The value of a column that our documents have; None for documents of other tasks, which may be of any type."""
    return instance.doc.get(column) if isinstance(instance.doc, Mapping) else None


def decoding_of_task(kwargs: Mapping[str, Any], default: Decoding) -> Decoding:
    """Decoding and limits from a task's `generation_kwargs`. ValueError names an unknown key.

    Greedy unless `do_sample` is true, or not given beside a temperature above 0. Sampling takes missing values from
    `sampled`.
    """
    check_known("generation_kwargs key", kwargs, GENERATION_KEYS)
    given = {key: value for key, value in kwargs.items() if value is not None}
    length = next((given[key] for key in LENGTH_KEYS if key in given), default.max_completion_length)
    limits = {
        "max_latents": given.get("max_latents", default.max_latents),
        "max_completion_length": int(length),
    }
    if not given.get("do_sample", float(given.get("temperature", 0)) > 0):
        # `do_sample: false` takes precedence over any temperature.
        return dataclasses.replace(DECODINGS["greedy"], **limits)
    draws: dict[str, Any] = {key: float(given[key]) for key in DRAWING_KEYS if key in given}
    return dataclasses.replace(DECODINGS["sampled"], **draws, **limits)


def register() -> None:
    """Make `--model colar` known to an lm-eval that does not read entry points."""
    if "colar" not in model_registry:
        model_registry.register("colar", target=ColarLM)


def run(words: Sequence[str]) -> None:
    """Run lm-eval's own command line with our model, our tasks and `--batch_size auto` as the default."""
    from lm_eval.__main__ import cli_evaluate

    register()
    before = sys.argv
    # lm-eval reads the arguments of the process, and accepts no others.
    sys.argv = ["lm-eval", *with_ours(words)]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


def with_ours(words: Sequence[str]) -> list[str]:
    """Add the folder of our tasks and, unless a file has the settings (`--config`), `--batch_size auto`.

    lm-eval's own default is one row at a time.
    """
    if not words or "-h" in words or "--help" in words:
        return list(words)
    command, others = (words[:1], words[1:]) if words[0] in COMMANDS else ([], words)
    ours = ["--include_path", str(TASKS)]
    # An argument would take precedence over the file.
    from_file = any(word.startswith(("-C", "--config")) for word in others)
    if list(command) in ([], ["run"]) and not from_file:
        ours += ["--batch_size", "auto"]
    # If an option is given twice, the last one counts. Ours come first, so that the user's takes precedence in any
    # spelling (`-b8`, `--batch 8`).
    return [*command, *ours, *others]


# Called by the task files in `tasks/`: documents from our data loader, and our judge's verdict


def documents(
    source: str | None = None, data: str | None = None, split: str = "test", **others: Any
) -> dict[str, Any]:
    """The questions of a source, or of a user's file (`data`), as lm-eval's documents.

    Looked up as by `colar evaluate`: under `data_dir`, else under COLAR_DATA_DIR, else on the Hub. lm-eval also passes
    all model arguments, which are ignored. ValueError if neither is given, and as raised by the loader.
    """
    if source is None:
        if data is None:
            raise ValueError("task colar_file needs its file: --metadata data=questions.jsonl")
        # Checked here, because the loader would accept the name of a source as well.
        if not Path(data).exists():
            raise ValueError(f"--metadata data={data}: no such file")
        source = data
    table = []
    for row in sources.load_examples(source, split, data_dir=others.get("data_dir")):
        turns = json.dumps(row.context) if row.context else ""
        own = {"id": row.id, "question": row.question, "answer": row.answer, "answer_type": row.answer_type}
        table.append({**own, TURNS: turns})
    # "test" for any split: the task files have `test_split: test`.
    return {"test": datasets.Dataset.from_list(table)}


def verdicts(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The judge's verdict on an answer: 1.0 if it is right, else 0.0."""
    return {"judged": float(verdict_by_type(results[0], doc["answer"], doc["answer_type"]).correct)}
