"""Two synthetic tasks with exact answers: short word problems, and retrieval of codes by key.

Both come as training documents and as test sets. Everything is a function of a `random.Random` or a seed, and the
training and test splits are disjoint in content: a problem (or a list of codes) belongs to the test split iff its
SHA-256 falls in one residue class, and each generator redraws until it is on its own side.

Formats, exactly:

    Question: Tom has 5 apples. Tom buys 7 more apples. How many apples does Tom have now?
    Answer: 5 + 7 = 12
    #### 12

    The code of river is 377.
    What is the code of river? The code of river is 377.
"""

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TEST_SEED = 20_261_201
_TEST_RESIDUE_MODULUS = 10

NAMES = tuple(
    "Tom Anna Ben Mary John Emma Sam Lucy Peter Kate Jack Alice Paul Jane Henry Rose Mark Ruth Will Ella".split()
)
ITEMS = tuple("apples books coins eggs stones flowers cards boxes cups shells birds letters plants stars rings".split())

# Common words, each one token of the demo vocabulary: a small model learns to look those up, and no longer ones.
KEYS = tuple(
    """river stone garden horse table window mountain forest market silver iron paper letter music morning
    evening night spring water fire earth wind snow rain sun moon star sea ship boat road house room door
    wall floor bed book picture glass bread milk sugar salt fruit flower tree leaf grass field farm dog cat
    bird fish bear king mother father brother child woman master friend hand head heart foot arm face eye
    mouth hair skin blood bone brain voice law war peace power truth hope fear love science history nature
    machine engine wheel gun rope cloth gold oil gas plant animal cell north south red blue green white
    black brown city town country church school prison station army bank office store block square circle
    line point box bag hat coat""".split()
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticProblem:
    """A word problem: `worked` is the computation, `answer` the number after `####`."""

    question: str
    worked: str
    answer: str
    family: str

    def document_text(self) -> str:
        """The problem as it stands in training documents and few-shot prompts."""
        return f"Question: {self.question}\nAnswer: {self.worked}\n#### {self.answer}\n\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class ArithmeticTest:
    """A test item: greedy decoding of `prompt` should reach `#### answer`."""

    question: str
    prompt: str
    answer: str
    family: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalTest:
    """A test item: the first number of the greedy continuation of `prompt` should be `answer`."""

    prompt: str
    answer: str
    num_keys: int


def in_test_split(content: str) -> bool:
    """Whether `content` belongs to the test split; a fixed property of the text."""
    digest = hashlib.sha256(content.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _TEST_RESIDUE_MODULUS == 0


# Word problems -------------------------------------------------------------------------------------------------------

# (what happens, operator): the second number completes the sentence. Subtractions draw it no larger than the first.
_CHANGES = (
    ("{name} buys {n} more {item}.", "+"),
    ("{name} finds {n} more {item}.", "+"),
    ("A friend gives {name} {n} more {item}.", "+"),
    ("{name} sells {n} of the {item}.", "-"),
    ("{name} loses {n} of the {item}.", "-"),
    ("{name} gives {n} of the {item} to a friend.", "-"),
)


def _apply(operator: str, left: int, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def _change(rng: random.Random, name: str, item: str, count: int) -> tuple[str, str, int]:
    """One sentence that changes a count: (sentence, `a + b = c`, c)."""
    template, operator = rng.choice(_CHANGES)
    amount = rng.randint(1, 60) if operator == "+" else rng.randint(1, max(1, min(60, count)))
    result = _apply(operator, count, amount)
    return template.format(name=name, item=item, n=amount), f"{count} {operator} {amount} = {result}", result


def _start(rng: random.Random, name: str, item: str) -> tuple[str, int]:
    count = rng.randint(2, 60)
    return f"{name} has {count} {item}.", count


def _product(rng: random.Random, name: str, item: str) -> tuple[str, str, int]:
    bags, each = rng.randint(2, 9), rng.randint(2, 9)
    return f"{name} has {bags} bags with {each} {item} in each bag.", f"{bags} * {each} = {bags * each}", bags * each


def _one_step(rng: random.Random) -> ArithmeticProblem:
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    if rng.random() < 0.25:
        sentence, worked, result = _product(rng, name, item)
        ask = f"How many {item} does {name} have?"
    else:
        first, count = _start(rng, name, item)
        second, worked, result = _change(rng, name, item, count)
        sentence, ask = f"{first} {second}", f"How many {item} does {name} have now?"
    return ArithmeticProblem(question=f"{sentence} {ask}", worked=worked, answer=str(result), family="one-step")


def _two_step(rng: random.Random) -> ArithmeticProblem:
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    if rng.random() < 0.25:
        first, worked_first, count = _product(rng, name, item)
        middle = ""
    else:
        first, start = _start(rng, name, item)
        middle, worked_first, count = _change(rng, name, item, start)
        middle = " " + middle
    if count == 0:  # nothing is left to sell or to lose: draw again
        return _two_step(rng)
    last, worked_last, result = _change(rng, name, item, count)
    return ArithmeticProblem(
        question=f"{first}{middle} {last} How many {item} does {name} have now?",
        worked=f"{worked_first}, {worked_last}",
        answer=str(result),
        family="two-step",
    )


_FAMILIES: dict[str, Callable[[random.Random], ArithmeticProblem]] = {"one-step": _one_step, "two-step": _two_step}


def arithmetic_problem(rng: random.Random, family: str, test: bool = False) -> ArithmeticProblem:
    """Draws a problem of `family` ("one-step" or "two-step") from the training or the test split."""
    if family not in _FAMILIES:
        raise ValueError(f"unknown family {family!r}: choose one of {sorted(_FAMILIES)}")
    while True:
        problem = _FAMILIES[family](rng)
        if in_test_split(problem.question) == test:
            return problem


def arithmetic_document(rng: random.Random, num_problems: int = 12) -> str:
    """A training document: problems of both families, one after the other."""
    return "".join(
        arithmetic_problem(rng, rng.choice(("one-step", "two-step"))).document_text() for _ in range(num_problems)
    )


def arithmetic_test_set(
    num_items: int, family: str = "one-step", num_shots: int = 2, seed: int = TEST_SEED
) -> list[ArithmeticTest]:
    """Distinct test problems, each behind `num_shots` solved problems of the training split and ending in `Answer:`."""
    rng = random.Random(f"arithmetic-test-{family}-{seed}")
    problems: dict[str, ArithmeticProblem] = {}
    while len(problems) < num_items:
        problem = arithmetic_problem(rng, family, test=True)
        problems[problem.question] = problem
    items = []
    for problem in problems.values():
        shots = "".join(arithmetic_problem(rng, family).document_text() for _ in range(num_shots))
        prompt = f"{shots}Question: {problem.question}\nAnswer:"
        items.append(ArithmeticTest(question=problem.question, prompt=prompt, answer=problem.answer, family=family))
    return items


def arithmetic_answer(completion: str) -> str | None:
    """The number after the first `####` of a completion, or None."""
    match = re.search(r"####\s*(-?\d+)", completion)
    return match.group(1) if match else None


# Retrieval -----------------------------------------------------------------------------------------------------------


def _code_sentences(rng: random.Random, num_keys: int, test: bool) -> tuple[dict[str, int], list[str]]:
    if not 1 <= num_keys <= len(KEYS):
        raise ValueError(f"num_keys must be 1 to {len(KEYS)}, not {num_keys}")
    while True:
        codes = {key: rng.randint(100, 999) for key in rng.sample(KEYS, num_keys)}
        sentences = [f"The code of {key} is {code}." for key, code in codes.items()]
        if in_test_split("\n".join(sentences)) == test:
            return codes, sentences


def _spread(rng: random.Random, sentences: Sequence[str], filler: Sequence[str]) -> str:
    """The code sentences in order, as lines of their own at random places among the filler lines."""
    slots = sorted(rng.randint(0, len(filler)) for _ in sentences)
    lines, used = [], 0
    for sentence, slot in zip(sentences, slots, strict=True):
        lines += [*filler[used:slot], sentence]
        used = slot
    return "\n".join([*lines, *filler[used:]]) + "\n"


def retrieval_document(rng: random.Random, num_keys: int, num_questions: int = 24, filler: Sequence[str] = ()) -> str:
    """A training document: `num_keys` codes, spread among the lines of `filler` if given, then questions.

    Many questions a document are what makes the task learnable: each repeats the lookup over the same context.
    """
    codes, sentences = _code_sentences(rng, num_keys, test=False)
    asked = rng.sample(sorted(codes), min(num_questions, num_keys))
    questions = [f"What is the code of {key}? The code of {key} is {codes[key]}.\n" for key in asked]
    return _spread(rng, sentences, filler) + "".join(questions)


def retrieval_test_set(
    num_items: int, num_keys: int, filler: Sequence[str] = (), seed: int = TEST_SEED
) -> list[RetrievalTest]:
    """Test items with fresh codes and one question each; the prompt ends in the question mark."""
    rng = random.Random(f"retrieval-test-{num_keys}-{seed}")
    items = []
    for _ in range(num_items):
        codes, sentences = _code_sentences(rng, num_keys, test=True)
        key = rng.choice(sorted(codes))
        prompt = f"{_spread(rng, sentences, filler)}What is the code of {key}?"
        items.append(RetrievalTest(prompt=prompt, answer=str(codes[key]), num_keys=num_keys))
    return items


def retrieval_answer(completion: str) -> str | None:
    """The first number of a completion, or None."""
    match = re.search(r"\d+", completion)
    return match.group(0) if match else None
