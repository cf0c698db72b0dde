r"""The judge of both RL rewards and evaluation: is this completion the gold answer?

Three steps, the same for the completion and for the gold: locate the answer, read it as its type, compare. The answer
is located in the last `\boxed{}`; else in the sentence after the last "answer is" or "answer:", because a model that
corrects itself states its final answer last; else in the whole text.

Text that a model invents behind a complete answer is not read: the first "#### 4" ends the answer, as in GSM8K's rows,
so that it is final, and so does the next "Question:", "Problem:", "Q:" or "User:".

Characters that look alike are unified (`numbers.py`): full-width digits, composed accents, dashes, quotes, hard spaces.
An answer is read by its type:

| type | read as | compared |
|---|---|---|
| number | the one value stated there (`numbers.py`); "6*7 = 42" is 42 | integer golds exactly, others to 1e-3 |
| latex | the expression (the `$...$` where there is one, or a list of them) | units, then math-verify (`latex.py`) |
| choice | a letter A-J ("B", "(B)", "B. Rome", alone on the first line) or True / False | identical |
| text | all but a marker that it begins with; case, white space, bold, quotes, final punctuation dropped | identical |

A gold with a fraction is compared as by GSM-Hard's authors (PAL), to an absolute 1e-3; `numbers.py` has the source.

Nothing is guessed: two different values ("12 13 14", "x = 1 or x = 2"), two letters, "not (B)", a number whose
value the text beside it changes ("2\pi", "1.5 million", "x >= 5"), or nothing readable are unparsable: judged wrong,
and counted as unparsable. Departure from the published code: commas are not deleted, so (1,2) is not 12.
"""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce

from colar import files
from colar.data.example import ANSWER_TYPES, AnswerType, Example
from colar.data.judge.latex import WORDS, as_latex, extract_boxed, formula, plain, same_maths, undelimited
from colar.data.judge.numbers import PLAIN, canonical, folded, read_number, same_number

MAX_CHARACTERS = 1000
"""Most characters of an expression in LaTeX."""

# "This answer is correct" states no answer.
_MARKER = re.compile(
    r"####|\banswer\**(?:\s+is\b(?!\s+(?:correct|right|reasonable)\b)|\s*[:=])\**\s*:?", re.IGNORECASE
)
# "#### 4", as GSM8K's rows end; not the heading "#### 1. Add the prices" or "#### Solution".
_FINAL = re.compile(
    r"(?:^####[ \t]*(?![0-9]+[.)][ \t]+\S)|(?<=[^\n#])####[ \t]*)"
    r"(?:[-+$€£¥\\(]*[0-9.]|\$|\\|\(?[A-Ja-j][).]?[ \t]*$|(?:True|False)\b)",
    re.MULTILINE,
)
_BOLD = re.compile(r"(?<![\w)*])\*\*([^*]+)\*\*(?![\w*])")  # "2**3" is a power
_NEXT = re.compile(r"(?<=\s)(?:\*\*|#+\s*)?(?:Question|Problem|Exercise|Q|User|Human)(?:\s?[0-9]+)?\s?:")
_SENTENCE = re.compile(r"\s+(?:[A-Z][a-z]|I\b)")
_LEADING_MARKER = re.compile(r"(?:####|(?:the )?(?:final )?answer(?: is\b| ?:))\s*:?\s*", re.IGNORECASE)
# Spans that are not cut: a displayed formula, and text in braces such as \text{ sq. units}. And the end of a sentence,
# which is neither in "Rs. 50" or "approx. 50" nor behind LaTeX's `\!`.
_SENTENCE_PART = re.compile(
    r"\$\$(?:\\.|[^$\\])+\$\$|\\\[(?:(?!\\[\[\]]).)+\\\]|\\\((?:(?!\\[()]).)+\\\)|\{[^{}]*\}"
    r"|(?P<end>\n|(?<=[.?])(?<!\b[Rr]s\.)(?<!\bapprox\.)\s|(?<=(?<!\\)!)\s)",
    re.DOTALL,
)
_WHOLE_LETTER = re.compile(r"(?:(?:option|choice)\s*)?\(?([A-J])[).:]*", re.IGNORECASE)
# "(B)" or "B."; or what may be the initial of "Franklin D. Roosevelt", or the second of "A. Paris B. Rome".
_LABEL = re.compile(
    r"\b(?!Option|Choice|Answer)[A-Z][a-z]+,? (?P<initial>[A-J])\.(?=\s*\S)"
    r"|\((?P<enclosed>[A-J])\)|(?:^|(?<=\s))(?P<letter>[A-J])[.):](?=\s*\S)"
)
_JOINED = re.compile(
    r"(?:\([A-J]\)|\b[A-J][.):])\s*(?:[,/&]|and|or)\s*\(?[A-HJ]\b|\b[A-J]\s*,\s*[A-J][.):](?=\s*\S)"
)
# "E. coli" directly behind a label is a name.
_NAMED = re.compile(r"((?:\([A-J]\)|(?:^|(?<=\s))[A-J][.):])\s*)[A-J]\.(?=\s*[a-z]{2})")
_DENIED = re.compile(
    r"(?:\b(?:not|cannot|never|neither|none)|n['’]t)(?:\s+(?:be|of|the|answer|option|choice))*\s*$",
    re.IGNORECASE,
)
_TRUTH = re.compile(r"\b(true|false)\b", re.IGNORECASE)
_NEGATION = re.compile(r"\b(?:not|cannot|never|neither)\b|n['’]t\b", re.IGNORECASE)


@dataclass(frozen=True)
class Verdict:
    """`parsed` is the answer in one spelling per value, on which votes are counted; None if unparsable."""

    correct: bool
    parsed: str | None


def verdict(completion: str, example: Example) -> Verdict:
    """Judge a completion of this example: by its own judge if the user has given one, else by its answer's type."""
    if example.judge:
        # An empty answer is wrong for any judge.
        parsed = extract(completion, "text")
        return Verdict(parsed is not None and accepts(completion, example), parsed)
    return verdict_by_type(completion, example.answer, example.answer_type)


def verdict_by_type(completion: str, answer: str, answer_type: AnswerType) -> Verdict:
    """Judge the text generated after the second separator against the gold `answer`.

    Never raises on any text; ValueError for an unknown `answer_type`, RuntimeError if math-verify is missing.
    """
    parsed = extract(completion, answer_type)
    gold = extract(answer, answer_type)
    if parsed is None or gold is None:
        return Verdict(False, parsed)
    # Equal spellings need neither arithmetic nor math-verify.
    if parsed == gold:
        return Verdict(True, parsed)
    if answer_type == "latex":
        return Verdict(same_maths(_expression(spelled(answer)), _expression(spelled(completion))), parsed)
    if answer_type == "number":
        # `canonical` writes what Fraction reads: "-0.75", "1/3".
        return Verdict(same_number(Fraction(gold), Fraction(parsed)), parsed)
    return Verdict(False, parsed)


def extract(completion: str, answer_type: AnswerType) -> str | None:
    """Extract the answer that `completion` states, in its canonical spelling; None where none can be read."""
    completion = spelled(completion)
    if answer_type == "number":
        value = read_number(completion if PLAIN.fullmatch(completion) else _stated(completion))
        return None if value is None else canonical(value)
    if answer_type == "latex":
        expression = _expression(completion)
        return None if len(expression) > MAX_CHARACTERS else plain(expression) or None
    if answer_type == "choice":
        return _choice(_stated(completion))
    if answer_type == "text":
        return _text(completion)
    raise ValueError(f"answer_type must be one of {', '.join(ANSWER_TYPES)}, got {answer_type!r}")


def spelled(text: str) -> str:
    """The text with one spelling of characters that look alike, and without Markdown's bold."""
    return _BOLD.sub(r"\1", folded(text))


def understood(gold: str, answer_type: AnswerType) -> bool:
    """True if the judge reads all of a gold answer, not only a part of it: "42", but not "2 and 2 is 4. #### 4"."""
    read = extract(gold, answer_type)
    if read is None or answer_type != "number":
        return read is not None
    boxed = re.fullmatch(r"\$?\s*\\boxed\s*\{(.*)\}\s*\$?\.?", gold.strip(), re.DOTALL)
    value = read_number(boxed[1] if boxed else gold)
    return value is not None and canonical(value) == read


def _stated(text: str) -> str:
    """The part of `text` that states the answer."""
    text = _own(text)
    final = _FINAL.search(text) if "####" in text else None
    if final:
        text = text[: _sentence_end(text, text.index("####", final.start()) + 4)]
    if _has_box(text):
        return extract_boxed(text) or ""  # a box that never closes is a truncated answer: unparsable
    markers = list(_MARKER.finditer(text))
    if not markers:
        return text.strip()
    # The last one: a model that corrects itself states its final answer last. Text after the sentence is ignored.
    end = _sentence_end(text, markers[-1].end())
    after = text[markers[-1].end() : end].strip()
    # In "42! There are" the "!" ends a sentence; in "5!" alone it may be a factorial.
    return after.removesuffix("!") if _SENTENCE.match(text, end) else after


def _sentence_end(text: str, start: int) -> int:
    """The place where the first sentence behind `start` ends."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    for part in _SENTENCE_PART.finditer(text, begin):
        if part["end"] is not None:
            return part.start()
    return len(text)


def _own(text: str) -> str:
    """`text` up to the next question that a model invents behind its answer."""
    if ":" not in text:
        return text
    for following in _NEXT.finditer(text):
        own = text[: following.start()].strip()
        # A question that is repeated before its answer does not cut the text.
        if _MARKER.search(own) or _has_box(own) or (own and "\n" not in own and not own.endswith(":")):
            return own
    return text


def _expression(text: str) -> str:
    """The stated answer as LaTeX: the box, the one `$...$`, or all of it. `\\text{}` still marks words."""
    stated = as_latex(_stated(text))
    if _has_box(text):
        return stated
    # "The answer is $x^2+1$" means the formula; of "$5$, not $6$" neither is taken for the answer.
    inner = formula(stated)
    return stated if inner is None else inner


def _has_box(text: str) -> bool:
    return "\\boxed" in text or "\\fbox" in text


def _choice(stated: str) -> str | None:
    lines = [_WHOLE_LETTER.fullmatch(line.strip()) for line in stated.splitlines()]
    if lines and lines[0]:
        # The reason may follow on other lines, another letter may not.
        alone = {line[1].upper() for line in lines if line}
        return alone.pop() if len(alone) == 1 else None
    # Formulas are read without their dollars, because "A. $5$ B. $6$" has two labels.
    spaced = WORDS.sub(r"\1", undelimited(stated.strip()).replace("$", " "))
    spaced = _NAMED.sub(r"\1", " ".join(spaced.split()).strip("\"'`* "))
    stated = plain(stated).strip("\"'`* ")
    letter = _WHOLE_LETTER.fullmatch(stated)
    if letter:  # nothing but a letter: lower case will do; in a sentence "a" is a word
        return letter[1].upper()
    found = list(_LABEL.finditer(spaced))
    labels = [label for label in found if not label["initial"]]
    letters: set[str] = {label["enclosed"] or label["letter"] for label in labels}
    if letters:
        # A list of all options chooses none of them. It begins with A: in "B. George C. Marshall" C is an initial.
        lists = letters == {"A"} and any(label["initial"] == "B" for label in found)
        denied = _DENIED.search(spaced[: labels[0].start()]) or _JOINED.search(spaced)
        return None if lists or denied or len(letters) > 1 else letters.pop()
    truths: set[str] = {word.capitalize() for word in _TRUTH.findall(stated)}
    # "It is not true" states the opposite of its word, so it is not read.
    if len(truths) != 1 or _NEGATION.search(stated):
        return None
    return truths.pop()


def _text(completion: str) -> str | None:
    text = " ".join(_own(completion).replace("—", "-").split())
    leading = _LEADING_MARKER.match(text)
    if leading:
        text = text[leading.end() :]
    lower = folded(text.casefold())
    bare = lower.lstrip("\"'` ").rstrip(".!?,;: \"'`")
    # An answer of nothing but punctuation keeps it.
    return bare or lower or None


# A user's own judge. It is named on the command line, in a recipe or in Python, never in a row, because a data file
# must not choose code to run.

Judge = Callable[[str, str, str], bool]
"""`function(question, gold, answer) -> bool`, named `module:function`: replaces judging by answer type."""
TRIED = 20
"""Number of rows on whose gold answers a user's judge is tried before any work."""


def judge_name(judge: str | Judge | None) -> str | None:
    """`module:function` of a judge, which may be given as the function itself. ValueError for a lambda or a closure."""
    if judge is None or isinstance(judge, str):
        return judge
    name = f"{getattr(judge, '__module__', None)}:{getattr(judge, '__qualname__', repr(judge))}"
    if "<" in name or not callable(judge):
        raise ValueError(f"judge must be a function of a module, or module:function, got {judge!r}")
    return name


def load_judge(name: str) -> Judge:
    """Import a judge; a module in the working directory is found too. ValueError if it cannot be imported.

    Not cached: a function of a notebook is another one after its cell has run again.
    """
    module, _, path = name.partition(":")
    if not module or not path:
        raise ValueError(
            f"judge {name!r}: give module:function, e.g. my_judge:same for same() in my_judge.py"
        )
    # `sys.path` holds the folder of the command, not the user's working directory.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, SyntaxError, AttributeError) as error:
        raise ValueError(f"judge {name}: {type(error).__name__}: {error} (in {os.getcwd()})") from error
    if not callable(function):
        raise ValueError(f"judge {name} is no function")
    return function


def judge_settings(name: str | None) -> dict[str, str]:
    """A judge as settings of an evaluation, its name and a digest of its module's source, or of its own in a notebook;
    {} without a name.

    Verdicts are recorded, so records of a judge that has been edited since are those of another one.
    """
    if not name:
        return {}
    function = load_judge(name)
    source = name  # compiled code has none
    for each in (function, sys.modules[name.partition(":")[0]]):
        with suppress(OSError, TypeError):
            source = inspect.getsource(each)
    return {"judge": name, "judge_source": files.digest([source])}


def judged_by(examples: Sequence[Example], name: str | None) -> list[Example]:
    """The examples with the judge of this name; unchanged if `name` is None.

    ValueError if it cannot be imported, fails, or accepts none of the first `TRIED` gold answers.
    """
    if name is None:
        return list(examples)
    judged = [replace(example, judge=name) for example in examples]
    tried = judged[:TRIED]
    if tried and not any(accepts(example.answer, example) for example in tried):
        raise ValueError(
            f"judge {name} finds no gold answer right, e.g. {tried[0].answer!r} of {tried[0].id}: "
            "it is called as function(question, gold, answer) and returns True or False"
        )
    return judged


def accepts(completion: str, example: Example) -> bool:
    """The verdict of the example's own judge. ValueError if it fails, or returns neither True nor False."""
    try:
        right = load_judge(example.judge)(example.question, example.answer, completion.strip())
    except Exception as error:
        raise ValueError(f"judge {example.judge} on {example.id}: {type(error).__name__}: {error}") from error
    # numpy's booleans and 0 and 1 count as well.
    if right is None or right not in (True, False):
        raise ValueError(f"judge {example.judge} on {example.id} returned {right!r}, expected True or False")
    return bool(right)
