"""The two synthetic tasks: right answers, disjoint splits, and the formats that training and evaluation share."""

import random
from pathlib import Path

import pytest

from pwjax.demo.synthetic import (
    ITEMS,
    KEYS,
    arithmetic_answer,
    arithmetic_document,
    arithmetic_problem,
    arithmetic_test_set,
    in_test_split,
    retrieval_answer,
    retrieval_document,
    retrieval_test_set,
)
from pwjax.demo.tokenizer import END_OF_TEXT, load_tokenizer

CHECKPOINT = Path("checkpoints/demo-moe")


def evaluate(worked: str) -> int:
    """Checks every `a op b = c` of a worked answer, and that each starts from the last result."""
    result = None
    for step in worked.split(", "):
        left, operator, right, _, claimed = step.split()
        if result is not None:
            assert int(left) == result
        a, b = int(left), int(right)
        result = {"+": a + b, "-": a - b, "*": a * b}[operator]
        assert result == int(claimed)
    assert result is not None
    return result


@pytest.mark.parametrize("family", ["one-step", "two-step"])
def test_worked_answers_are_right(family):
    rng = random.Random(0)
    for _ in range(500):
        problem = arithmetic_problem(rng, family)
        assert evaluate(problem.worked) == int(problem.answer) >= 0
        assert problem.worked.count("=") == (1 if family == "one-step" else 2)
        assert arithmetic_answer(problem.document_text()) == problem.answer


def test_splits_are_disjoint_in_content():
    rng = random.Random(1)
    trained = {arithmetic_problem(rng, "one-step").question for _ in range(2000)}
    tested = {item.question for item in arithmetic_test_set(200)}
    assert len(tested) == 200
    assert not trained & tested
    assert all(map(in_test_split, tested)) and not any(map(in_test_split, trained))


def test_generators_depend_on_the_seed_alone():
    assert arithmetic_document(random.Random(3)) == arithmetic_document(random.Random(3))
    assert retrieval_document(random.Random(3), 9) == retrieval_document(random.Random(3), 9)
    assert arithmetic_test_set(5) == arithmetic_test_set(5) != arithmetic_test_set(5, seed=1)
    assert retrieval_test_set(5, 4) == retrieval_test_set(5, 4) != retrieval_test_set(5, 4, seed=1)


def test_retrieval_answers_stand_in_the_prompt_once():
    for item in retrieval_test_set(20, 16):
        key = item.prompt.rsplit(" ", 1)[1].removesuffix("?")
        assert item.prompt.count(f"The code of {key} is {item.answer}.\n") == 1
        assert item.prompt.count("The code of ") == item.num_keys == 16
        assert retrieval_answer(f" The code of {key} is {item.answer}.\n") == item.answer


def test_filler_lines_keep_their_order_around_the_codes():
    filler = [f"line {i}" for i in range(50)]
    lines = retrieval_document(random.Random(0), 8, filler=filler).split("\n")
    assert [line for line in lines if line.startswith("line")] == filler
    assert lines.index("line 0") < len(lines) - 10


def test_bad_requests_say_what_is_allowed():
    with pytest.raises(ValueError, match="one-step"):
        arithmetic_problem(random.Random(0), "three-step")
    with pytest.raises(ValueError, match=str(len(KEYS))):
        retrieval_document(random.Random(0), len(KEYS) + 1)
    assert arithmetic_answer("no number") is None and retrieval_answer("none") is None


def test_vocabulary_spells_keys_and_digits_as_single_tokens():
    tokenizer = load_tokenizer(CHECKPOINT)
    assert tokenizer.token_to_id(END_OF_TEXT) == tokenizer.get_vocab_size() - 1 == 4095
    assert len(set(KEYS)) == len(KEYS)
    assert all(len(tokenizer.encode(f" {word}").ids) == 1 for word in KEYS + ITEMS)
    assert tokenizer.encode(" 377").tokens == ["Ġ", "3", "7", "7"]
    text = "“Naïve” café\n\n\tx = 3.14  \r\nend"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
