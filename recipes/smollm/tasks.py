"""Tasks that are generated and verified: sums and products, and every task of reasoning-gym by its name."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from composer_plugins.errors import ConfigError, in_a_line
from composer_plugins.recipes.shared import check_installed

ARITHMETIC = "arithmetic"
HINTS = WORKED, VERIFIER = ("worked", "verifier")  # what the hint channel's teacher sees
BRIEF = {"role": "system", "content": "Be brief."}
BEFORE, AFTER = "What is ", "?"  # an arithmetic question
HINT = "The correct reply is exactly: {}"
TRAINED, HELD_OUT = 220, 60  # questions
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

Row = dict[str, Any]


def is_wrong(reply: str, row: Row) -> str:
    """Say that a reply is wrong, and which answer is right."""
    return f"The reply is wrong. The right answer is {row['answer']}."


@dataclass(frozen=True)
class Task:
    """Questions to train on and others to be examined on, and the verifier of a reply."""

    name: str
    rows: Sequence[Row]  # with the columns prompt, answer and privileged_context
    held_out: Sequence[Row]
    score: Callable[[str, str], float]  # of a reply, by the answer that verifies it
    problem: Callable[[str, Row], str] = is_wrong  # of a wrong reply to the question of a row

    def feedback(self, reply: str, row: Row) -> str | None:
        """What is wrong with a reply to the question of a row, and the right answer; None if it is right.

        The text does not quote the reply, because a teacher that reads the reply prefers it.
        """
        return None if self.score(reply, row["answer"]) == 1 else self.problem(reply, row)

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
        question(f"{BEFORE}{a} {sign} {b}{AFTER}", str(answer), f"{a} {sign} {b} = {answer}")
        for a, sign, b, answer in facts
    ]
    return Task(ARITHMETIC, rows[HELD_OUT:][:TRAINED], rows[:HELD_OUT], last_number_is, wrong_number)


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
        return float(any(trained.score_answer(one, entries[answer]) == 1 for one in said))

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


def wrong_number(reply: str, row: Row) -> str:
    """Say that the last number of a reply to an arithmetic question is wrong, and which one is right."""
    answer, found = row["answer"], NUMBER.findall(reply)
    asked = row["prompt"][-1]["content"].removeprefix(BEFORE).removesuffix(AFTER)
    if not found:
        return f"The reply has no number. {asked} is {answer}."
    if float(found[-1]) == float(answer):  # as in "56.0", which the verifier does not take
        return f"The reply has the number {found[-1]}. Write it as {answer}."
    return f"{asked} is not {found[-1]}, it is {answer}."
