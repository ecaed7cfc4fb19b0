"""The embedded model's own tasks: arithmetic word problems and key retrieval, greedy, exact match.

They measure what perplexity can't: a wrong digit is a wrong answer. Items come from `pwjax.demo.synthetic`, test split.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from pwjax.demo.synthetic import arithmetic_answer, arithmetic_test_set, retrieval_answer, retrieval_test_set
from pwjax.engine.outputs import RequestOutput
from pwjax.engine.sampling_params import SamplingParams

ARITHMETIC_PARAMS = SamplingParams(max_tokens=64, stop=("\n\n", "Question:"))
RETRIEVAL_PARAMS = SamplingParams(max_tokens=24, stop=("\n",))


class GeneratingModel(Protocol):
    """The part of `LLM` that tasks need: outputs come in the order of the prompts."""

    def generate(self, prompts: Sequence[str], params: SamplingParams) -> list[RequestOutput]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Exact-match accuracy.

    Attributes:
        truncated: items whose text ended at the token limit, so that the answer may be cut off.
        correct: for every item, in order; lets two runs be compared item by item.
        generated_tokens: of all items together.
    """

    name: str
    correct: tuple[bool, ...]
    truncated: int
    generated_tokens: int

    @property
    def items(self) -> int:
        return len(self.correct)

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / self.items

    @property
    def standard_error(self) -> float:
        """Binomial."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.items)

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "accuracy": self.accuracy,
            "standard_error": self.standard_error,
            "items": self.items,
            "truncated": self.truncated,
            "generated_tokens": self.generated_tokens,
        }


def evaluate_arithmetic(
    llm: GeneratingModel, num_items: int = 200, family: str = "one-step", num_shots: int = 2
) -> TaskResult:
    """Word problems ("one-step" or "two-step") behind `num_shots` solved ones; right iff the number after #### is."""
    tests = arithmetic_test_set(num_items, family, num_shots)
    prompts, answers = [test.prompt for test in tests], [test.answer for test in tests]
    return _evaluate(llm, f"arithmetic-{family}", prompts, answers, arithmetic_answer, ARITHMETIC_PARAMS)


def evaluate_retrieval(
    llm: GeneratingModel, num_items: int = 200, num_keys: int = 16, filler: Sequence[str] = ()
) -> TaskResult:
    """One code among `num_keys`, spread over the `filler` lines; right iff the first number of the text is the code."""
    tests = retrieval_test_set(num_items, num_keys, filler)
    prompts, answers = [test.prompt for test in tests], [test.answer for test in tests]
    return _evaluate(llm, f"retrieval-{num_keys}", prompts, answers, retrieval_answer, RETRIEVAL_PARAMS)


def _evaluate(
    llm: GeneratingModel,
    name: str,
    prompts: Sequence[str],
    answers: Sequence[str],
    extract: Callable[[str], str | None],
    params: SamplingParams,
) -> TaskResult:
    outputs = llm.generate(prompts, params)
    return TaskResult(
        name=name,
        correct=tuple(extract(output.text) == answer for output, answer in zip(outputs, answers, strict=True)),
        truncated=sum(output.finish_reason == "length" for output in outputs),
        generated_tokens=sum(len(output.token_ids) for output in outputs),
    )
