"""The tasks' scoring: an oracle gets everything right, and wrong digits count as wrong."""

import re

import pytest

from pwjax.demo.synthetic import arithmetic_test_set
from pwjax.engine.outputs import RequestOutput
from pwjax.eval.tasks import TaskResult, evaluate_arithmetic, evaluate_retrieval


class Oracle:
    """Solves prompts by reading them; `spoil` changes the text of chosen items."""

    def __init__(self, solve, spoil=lambda index, text: text):
        self._solve, self._spoil = solve, spoil

    def generate(self, prompts, params):
        assert params.greedy
        outputs = []
        for index, prompt in enumerate(prompts):
            text = self._spoil(index, self._solve(prompt))
            text = min((text.split(stop)[0] for stop in params.stop), key=len)
            ids = tuple(text.encode())
            reason = "length" if "cut" in text else "stop"
            output = RequestOutput(request_id=index, prompt_tokens=1, token_ids=ids, text=text, finish_reason=reason)
            outputs.append(output)
        return outputs


def look_up(prompt):
    key = re.search(r"What is the code of (\w+)\?$", prompt)[1]
    return f" The code of {key} is {re.search(rf'The code of {key} is ([0-9]+)', prompt)[1]}.\nWhat is the code of 999?"


def test_retrieval():
    result = evaluate_retrieval(Oracle(look_up), num_items=30, num_keys=8)
    assert (result.accuracy, result.items, result.name) == (1.0, 30, "retrieval-8")
    wrong = Oracle(look_up, lambda index, text: text.replace("is ", "is 9") if index < 6 else text)
    assert evaluate_retrieval(wrong, num_items=30, num_keys=8).correct == (False,) * 6 + (True,) * 24


@pytest.mark.parametrize("family", ["one-step", "two-step"])
def test_arithmetic(family):
    answers = {test.prompt: test.answer for test in arithmetic_test_set(25, family, 2)}

    def solve(prompt):
        return f" 1 + 1 = 2\n#### {answers[prompt]}\n\nQuestion: and so on\n#### 77777"

    def spoil(index, text):
        return {0: " cut", 1: "", 2: text.replace("#### ", "#### 1")}.get(index, text)

    assert evaluate_arithmetic(Oracle(solve), 25, family).accuracy == 1
    result = evaluate_arithmetic(Oracle(solve, spoil), 25, family)
    assert result.correct == (False,) * 3 + (True,) * 22
    assert result.truncated == 1


def test_result_fields():
    result = TaskResult(name="x", correct=(True, True, False, True), truncated=0, generated_tokens=9)
    assert result.standard_error == pytest.approx((0.75 * 0.25 / 4) ** 0.5)
    assert result.to_json()["accuracy"] == 0.75
