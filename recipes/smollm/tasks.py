"""Tasks that are generated and verified: sums and products, and every task of reasoning-gym by its name."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from composer_plugins.errors import ConfigError, in_a_line
from composer_plugins.recipes.shared import check_installed

ARITHMETIC = "arithmetic"
BRIEF = {"role": "system", "content": "Be brief."}
HINT = "The correct reply is exactly: {}"
TRAINED, HELD_OUT = 220, 60  # questions
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Questions to train on and others to be examined on, and the verifier of a reply."""

    name: str
    rows: Sequence[Row]  # with the columns prompt, answer and privileged_context
    held_out: Sequence[Row]
    score: Callable[[str, str], float]  # of a reply, by the answer that verifies it

    def reward(self, completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
        """The verifier as a reward function of TRL's."""
        both = zip(completions, answer, strict=True)
        return [self.score(completion[0]["content"], right) for completion, right in both]


def make_task(name: str) -> Task:
    """Return the task of this name. Its questions are the same at every call.

    Raises ConfigError for a name that reasoning-gym does not have.
    """
    return arithmetic() if name == ARITHMETIC else of_reasoning_gym(name)


def arithmetic() -> Task:
    """Products up to 12 * 12 and sums up to 49 + 49. A reply is right if its last number is."""
    draw = random.Random(1)
    facts = [(a, "*", b, a * b) for a in range(2, 13) for b in range(2, 13)]
    sums = draw.sample([(a, b) for a in range(10, 50) for b in range(10, 50)], 160)
    facts += [(a, "+", b, a + b) for a, b in sums]
    draw.shuffle(facts)
    rows = [
        question(f"What is {a} {sign} {b}?", str(answer), f"{a} {sign} {b} = {answer}")
        for a, sign, b, answer in facts
    ]
    return Task(ARITHMETIC, rows[HELD_OUT:][:TRAINED], rows[:HELD_OUT], last_number_is)


def of_reasoning_gym(name: str) -> Task:
    """A task of reasoning-gym, whose verifier gives the reward."""
    check_installed("--task", ["reasoning_gym"], "smollm")
    import reasoning_gym

    try:
        trained = reasoning_gym.create_dataset(name, size=TRAINED, seed=1)
        held_out = reasoning_gym.create_dataset(name, size=HELD_OUT, seed=2)
    except Exception as error:  # ValueError for a name; each task has errors of its own
        remedy = f"name {ARITHMETIC}, or a task of reasoning-gym"
        raise ConfigError("--task", f"{name!r} cannot be made: {in_a_line(error)}", remedy) from error
    entries = {entry["answer"]: entry for data in (trained, held_out) for entry in data}

    def score(reply: str, answer: str) -> float:
        said = [*NUMBER.findall(reply)[-1:], reply.strip()]
        return float(max(trained.score_answer(one, entries[answer]) == 1 for one in said))

    rows, others = ([question(x["question"], x["answer"]) for x in data] for data in (trained, held_out))
    return Task(name, rows, others, score)


def question(text: str, answer: str, reply: str = "") -> Row:
    """A row: the question, the answer that verifies a reply, and the hint, which shows a right reply."""
    hint = HINT.format(reply or answer)
    return {
        "prompt": [BRIEF, {"role": "user", "content": text}],
        "answer": answer,
        "privileged_context": hint,
    }


def last_number_is(reply: str, answer: str) -> float:
    """1 if the last number of the reply is the answer, otherwise 0."""
    return float(NUMBER.findall(reply)[-1:] == [answer])
