"""lm-evaluation-harness on a tiny model: the same questions, answers and verdicts as `colar evaluate`."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install '.[lm-eval]'")

from chats import CONTEXTS, chat_lm
from families import liven, publishable
from lm_eval import simple_evaluate
from lm_eval._cli import HarnessCLI
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from colar import files
from colar.cli import main
from colar.data import sources
from colar.engine import reference
from colar.engine.request import GREEDY, SAMPLED, Decoding, Request
from colar.integrations import lm_eval
from colar.methods import pretrained, registry
from colar.model import backbones
from colar.model.latent_lm import LatentLM
from colar.ops.noise import seed_from

N = 12


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Untrained `cot` and `colar` checkpoints: what they answer is noise, but they answer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ("cot", "colar"):
        lm = LatentLM.from_backbone(backbones.load("tiny", seed=1))
        method = registry.build(name)
        pretrained.attach(lm, method, 0)
        method.prepare(lm, [])
        pretrained.save(lm, method, folder / name, {"seed": 7, "label": ""}, "# card\n")
    return folder


def question(number):
    return f"Tom has {number} toys and finds {number + 3} more. How many toys does Tom have?"


def ours(folder, data, output, *options):
    """The records of `colar evaluate` on a file, by id."""
    words = ["evaluate", f"m={folder}", "--data", f"own={data}", "--output", str(output), *options]
    words += ["--max_latents", "6", "--max_completion_length", "3"]
    assert main(words) == 0
    return {record["id"]: record for _, record in files.read_jsonl(output / "records.jsonl")}


def theirs(folder, task, output, *options):
    """lm-eval's samples by id, and the task's results, through its own command line."""
    arguments = [f"pretrained={folder}", "max_latents=6", "max_gen_toks=3", "compression_factor=2"]
    words = ["lm-eval", "run", "--model", "colar", "--model_args", *arguments, "--tasks", task, *options]
    assert main([*words, "--output_path", str(output), "--log_samples"]) == 0
    (results,) = output.rglob("results_*.json")
    (samples,) = output.rglob(f"samples_{task}_*.jsonl")
    found = {sample["doc"]["id"]: sample for _, sample in files.read_jsonl(samples)}
    return found, json.loads(results.read_text())["results"][task]


def evaluated(model, tasks, metadata=None, **options):
    """lm-eval's results in Python, which need not read its own ten thousand task files."""
    manager = TaskManager(include_path=lm_eval.TASKS, include_defaults=False, metadata=metadata)
    with pytest.MonkeyPatch.context() as patch:
        # It starts processes that list what is installed.
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        return simple_evaluate(model, tasks=tasks, task_manager=manager, bootstrap_iters=0, **options)


@pytest.fixture(scope="module")
def own_file(checkpoints, tmp_path_factory):
    """Questions of which the colar checkpoint at c = 2 answers every second one as the file says, read as text."""
    folder = tmp_path_factory.mktemp("data")
    rows = []
    for number in range(N):
        rows.append(
            {
                "id": f"q{number}",
                "question": question(number),
                "steps": [],
                "answer": "x",
                "answer_type": "text",
            }
        )
    first = folder / "first.jsonl"
    first.write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = ours(
        checkpoints / "colar", first, folder / "first", "--compression_factor", "2", "--split", "train"
    )
    for number, row in enumerate(rows):
        completion = records[row["id"]]["completion"]
        row["answer"] = completion if number % 2 and completion.strip() else "no such answer"
    path = folder / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_and_accuracy_are_those_of_colar_evaluate(
    checkpoints, own_file, tmp_path, one_thread, monkeypatch
):
    # Its command line need not read its ten thousand task files, either.
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    folder = checkpoints / "colar"
    records = ours(folder, own_file, tmp_path / "ours", "--compression_factor", "2", "--split", "train")
    samples, results = theirs(folder, "colar_file", tmp_path / "theirs", "--metadata", f"data={own_file}")
    assert samples.keys() == records.keys()
    assert len(samples) == N
    for name, record in records.items():
        assert samples[name]["arguments"]["gen_args_0"]["arg_0"] == samples[name]["doc"]["question"]
        assert samples[name]["filtered_resps"] == [record["completion"]]
        assert samples[name]["judged"] == record["correct"]
    accuracy = sum(record["correct"] for record in records.values()) / N
    assert results["judged,none"] == accuracy
    # A model that always fails would agree with anything.
    assert 0 < accuracy < 1


def test_sampled_answers_are_those_of_colar_evaluate(checkpoints, own_file, tmp_path, one_thread):
    options = ["--compression_factor", "2", "--decoding", "greedy", "sampled", "--split", "train"]
    folder = checkpoints / "colar"
    words = ["evaluate", f"m={folder}", "--data", f"own={own_file}", "--output", str(tmp_path), *options]
    assert main([*words, "--max_latents", "6", "--max_completion_length", "3"]) == 0
    answers = {"greedy": {}, "sampled": {}}
    for _, record in files.read_jsonl(tmp_path / "records.jsonl"):
        answers[record["decoding"]][record["id"]] = record["completion"]
    assert answers["greedy"] != answers["sampled"]

    model = lm_eval.ColarLM(str(folder), compression_factor=2, max_latents=6, max_gen_toks=3)
    # Rows of a batch are no part of an answer.
    model.batch_size = 5
    results = evaluated(model, ["colar_file"], {"data": str(own_file)}, gen_kwargs={"do_sample": True})
    samples = results["samples"]["colar_file"]
    assert {sample["doc"]["id"]: sample["resps"][0][0] for sample in samples} == answers["sampled"]


FIXTURES = {
    "colar_gsm8k_aug": ("gsm8k_aug/test.txt", "".join(f"{question(n)}||<<{n}+{n}={2 * n}>> #### {2 * n}\n" for n in range(1, 5))),
    "colar_svamp": ("svamp/SVAMP.json", json.dumps([{"ID": f"chal-{n}", "Body": "Tom has 5 toys.", "Question": f"How many, times {n}?", "Equation": "( 5.0 * 1.0 )", "Answer": 5.0 * n, "Type": "Addition"} for n in range(1, 5)])),
    "colar_multiarith": ("multiarith/MultiArith.json", json.dumps([{"iIndex": n, "sQuestion": question(n), "lSolutions": [float(n)]} for n in range(1, 5)])),
    "colar_gsm_hard": ("gsm_hard/gsmhardv2.jsonl", "".join(json.dumps({"input": question(n), "code": "", "target": n + 0.5}) + "\n" for n in range(1, 5))),
}  # fmt: skip
SOURCE_OF = {
    "colar_gsm8k_aug": "gsm8k-aug",
    "colar_svamp": "svamp",
    "colar_multiarith": "multiarith",
    "colar_gsm_hard": "gsm-hard",
}


def test_the_published_sets_are_found_as_our_loader_finds_them(
    checkpoints, tmp_path, monkeypatch, one_thread
):
    for path, text in FIXTURES.values():
        (tmp_path / "data" / path).parent.mkdir(parents=True)
        (tmp_path / "data" / path).write_text(text)
    monkeypatch.setenv("COLAR_DATA_DIR", str(tmp_path / "data"))
    model = lm_eval.ColarLM(str(checkpoints / "cot"), max_latents=6, max_gen_toks=3)
    results = evaluated(model, ["colar"], {"pretrained": "cot"}, limit=3)
    for task, source in SOURCE_OF.items():
        docs = [sample["doc"] for sample in results["samples"][task]]
        rows = sources.load_examples(source, "test", limit=3)
        assert [(doc["id"], doc["question"], doc["answer"]) for doc in docs] == [
            (row.id, row.question, row.answer) for row in rows
        ]


@pytest.mark.parametrize(("completion", "verdict"), [("6*7 = 42", 1), ("4,2", 0)])
def test_an_answer_is_judged_by_our_judge(completion, verdict):
    assert lm_eval.verdicts({"answer": "42", "answer_type": "number"}, [completion]) == {"judged": verdict}


def instance(given, name="q", task="t", number=0):
    return Instance("generate_until", {"id": name}, (question(5), given), 0, metadata=(task, number, 1))


@pytest.fixture(scope="module")
def model(checkpoints):
    return lm_eval.ColarLM(str(checkpoints / "colar"), compression_factor=2, max_latents=6, max_gen_toks=5)


def test_answers_end_before_the_first_stop_text(model):
    (whole,) = model.generate_until([instance({"until": []})])
    assert len(whole) > 3
    stop = whole[2:]
    instances = [
        instance({"until": ["never", stop]}),
        instance({"until": stop}),
        instance({"until": [""]}),
        instance({}),
    ]
    assert model.generate_until(instances) == [whole[: whole.find(stop)]] * 2 + [whole] * 2


def test_a_repeated_document_is_drawn_again(model):
    given = {"do_sample": True, "until": []}
    a, b = instance(given, "a", number=0), instance(given, "b", number=1)
    answers = model.generate_until([a, a, b])
    again = model.generate_until([b, a, a])
    assert answers[0] != answers[1]
    assert [again[1], again[2], again[0]] == answers


def test_a_documents_draws_do_not_depend_on_other_documents_of_its_name(model):
    """Two tasks that number their documents alike, and one task with an id twice."""
    given = {"do_sample": True, "until": []}
    instances = [instance(given, "1"), instance(given, "1", task="other"), instance(given, "1", number=1)]
    together = model.generate_until([*instances, *instances])
    alone = [model.generate_until([each, each]) for each in instances]
    assert alone == [together[i::3] for i in range(3)]
    # Repeats are drawn anew, as before.
    assert all(first != second for first, second in alone)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, GREEDY),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.5}, GREEDY),
        ({"temperature": 0.0}, GREEDY),
        ({"do_sample": True}, SAMPLED),
        ({"temperature": 0.7}, Decoding(temperature=0.7, top_p=0.9, latent_temperature=1.0)),
        ({"do_sample": True, "top_p": 1.0, "latent_temperature": 0.5}, Decoding(1.0, 1.0, 0.5)),
        (dict.fromkeys(["do_sample", "temperature", "top_p", "max_latents", "max_gen_toks"]), GREEDY),
        ({"max_tokens": 9, "max_gen_toks": 7, "max_latents": 3}, Decoding(max_latents=3, max_completion_length=7)),
    ],
)  # fmt: skip
def test_how_a_task_is_drawn(given, expected):
    assert lm_eval.decoding_of_task(given, Decoding()) == expected


def test_a_cache_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match="model colar takes no --use_cache"):
        CachingLM(model, str(tmp_path / "cache.db"))


def test_likelihoods_are_refused_by_name(model):
    for ask in (model.loglikelihood, model.loglikelihood_rolling):
        with pytest.raises(ValueError, match="cannot answer hellaswag, piqa: they ask for the likelihood"):
            ask([instance({}, task="piqa"), instance({}, task="hellaswag")])
    with pytest.raises(ValueError, match="unknown generation_kwargs key 'top_k', did you mean 'top_p'"):
        model.generate_until([instance({"top_k": 5})])


def test_a_documents_own_turns_come_before_its_question(tmp_path):
    lm = liven(chat_lm("qwen3"))
    method = registry.build("sequential", {"compression_factors": [1, 2]})
    pretrained.attach(lm, method, 0)
    folder = pretrained.save(publishable(lm), method, tmp_path / "chat", {}, "# card\n")
    model = lm_eval.ColarLM(str(folder), compression_factor=2, max_latents=4, max_gen_toks=5)

    def answered(turns):
        doc = {"id": "q", lm_eval.TURNS: json.dumps(turns) if turns else ""}
        given = Instance("generate_until", doc, ("How many?", {"until": []}), 0, metadata=("t", 0, 1))
        return model.generate_until([given])[0]

    def expected(turns):
        seed = seed_from(0, "q")
        request = Request("q", "How many?", model.params, model.decoding, seed, context=tuple(turns))
        return reference.complete(model.lm, model.method, request).text

    for turns in CONTEXTS.values():
        assert answered(turns) == expected(turns)
    assert len({expected(turns) for turns in CONTEXTS.values()}) > 1


def test_lm_evals_own_chat_templates_are_refused(model, own_file):
    for options in ({}, {"fewshot_as_multiturn": True}, {"system_instruction": "Be brief."}):
        with pytest.raises(ValueError, match="model colar takes no --apply_chat_template"):
            evaluated(model, ["colar_file"], {"data": str(own_file)}, apply_chat_template=True, **options)


def test_mistakes_are_named(checkpoints, capsys):
    with pytest.raises(ValueError, match="method cot has no compression_factor; it takes none"):
        lm_eval.ColarLM(str(checkpoints / "cot"), compression_factor=2)
    with pytest.raises(ValueError, match="compression_factor must be a number, 1 or more, got 0.5"):
        lm_eval.ColarLM(str(checkpoints / "colar"), compression_factor=0.5)
    with pytest.raises(ValueError, match="max_latents must be 0 or more"):
        lm_eval.ColarLM(str(checkpoints / "colar"), max_latents=-1)
    with pytest.raises(ValueError, match="--metadata data=questions.jsonl"):
        lm_eval.documents(version=1.0, pretrained="x")
    with pytest.raises(ValueError, match="nowhere.jsonl: no such file"):
        lm_eval.documents(data="nowhere.jsonl")
    # On the command line they are one line, and exit code 2.
    assert main(["lm-eval", "run", "--model", "colar", "--tasks", "colar_file", "--log_samples"]) == 2
    assert "colar lm-eval: error: Specify --output_path" in capsys.readouterr().err


def test_our_model_and_tasks_are_known():
    lm_eval.register()
    lm_eval.register()
    assert get_model("colar") is lm_eval.ColarLM
    manager = TaskManager(include_path=lm_eval.TASKS, include_defaults=False)
    assert set(manager.all_tasks) == {*FIXTURES, "colar_file", "colar"}


def parsed(words, monkeypatch):
    """lm-eval's own reading of what we give it, where it reads it."""
    monkeypatch.setattr(sys, "argv", ["lm-eval", *lm_eval.with_ours(words.split())])
    return HarnessCLI().parse_args()


@pytest.mark.parametrize(
    ("words", "rows", "folder"),
    [
        ("run --tasks x", "auto", str(lm_eval.TASKS)),
        ("--tasks x", "auto", str(lm_eval.TASKS)),
        ("run --tasks x -b 8", "8", str(lm_eval.TASKS)),
        ("run --tasks x -b8", "8", str(lm_eval.TASKS)),
        ("run -b=8 --tasks x", "8", str(lm_eval.TASKS)),
        ("run -sb8 --tasks x", "8", str(lm_eval.TASKS)),
        ("run --tasks x --batch 8", "8", str(lm_eval.TASKS)),
        ("--tasks x --b=8", "8", str(lm_eval.TASKS)),
        ("run --include_path=mine --batch_size=4 --tasks x", "4", "mine"),
        ("run --tasks x --incl mine", "auto", "mine"),
        ("run -C file --batch 8", "8", str(lm_eval.TASKS)),
        ("ls tasks", None, str(lm_eval.TASKS)),
        ("ls --include mine tasks", None, "mine"),
        ("validate --tasks x", None, str(lm_eval.TASKS)),
    ],
)  # fmt: skip
def test_what_is_said_on_the_command_line_wins_over_what_is_added(words, rows, folder, monkeypatch):
    found = parsed(words, monkeypatch)
    assert getattr(found, "batch_size", None) == rows
    assert found.include_path == folder


@pytest.mark.parametrize("config", ["-C file", "--config=file"])
def test_a_file_of_settings_has_the_size_of_batches(config):
    given = lm_eval.with_ours(["run", *config.split()])
    assert given == ["run", "--include_path", str(lm_eval.TASKS), *config.split()]


@pytest.mark.parametrize("words", ["", "run --help", "-h", "run --tasks x -b 4"])
def test_the_words_themselves_stay_as_they_are(words):
    words = words.split()
    given = lm_eval.with_ours(words)
    assert [word for word in given if word in words] == words
    assert ("-h" in words or "--help" in words or not words) == (given == words)


@pytest.mark.parametrize(
    ("given", "expected"),
    [((None, 32), 32), (("auto", 32), 32), (("auto:4", 8), 8), (("16", 32), 16), ((4, 64), 4)],
)
def test_rows_of_a_batch(given, expected):
    assert lm_eval.rows(*given) == expected


@pytest.mark.parametrize("wrong", [0, "-3", "many"])
def test_rows_that_are_none(wrong):
    with pytest.raises(ValueError, match="batch_size must be auto or a whole number, 1 or more"):
        lm_eval.rows(wrong, 32)


def test_the_table_of_the_pinned_libraries_has_its_headings():
    """A pytablewriter of another decade calls them A, B, C."""
    result = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1}
    task = {"results": {"a": result}, "versions": {"a": 1}, "n-shot": {"a": 0}, "configs": {"a": {}}}
    table = make_table(task | {"higher_is_better": {"a": {"acc": True}}})
    assert table.startswith("|Tasks|Version|")
