"""Two teachers answer each question of a task over HTTP, and the task's verifier gives a reply its reward."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from composer_plugins.recipes.smollm.endpoint import Endpoint
from composer_plugins.recipes.smollm.prompts import prompt_with_answer
from composer_plugins.recipes.smollm.tasks import Row, Task
from composer_plugins.recipes.trace_replay.states import CUT_OFF, Message

TEACHERS = HINTED, PLAIN = "hinted", "plain"  # the one that sees the worked answer, and the one that does not
GREEDY, SAMPLED = {"temperature": 0}, {"temperature": 1, "top_p": 1}


@dataclass(frozen=True)
class Reply:
    """What a teacher answered to a question."""

    teacher: str
    question: list[Message]  # without the worked answer
    message: Message
    finish_reason: str
    reward: float

    @property
    def is_cut(self) -> bool:
        """Whether the reply reached the limit of tokens."""
        return self.finish_reason == CUT_OFF

    def line(self) -> str:
        """The reply as a line of a log that trace_replay reads.

        The lines of both teachers have the same messages, because trace_replay compares what was answered
        to the same messages.
        """
        choice = {"message": self.message, "finish_reason": self.finish_reason}
        line = {"teacher": self.teacher, "messages": self.question, "response": {"choices": [choice]}}
        return json.dumps({**line, "reward": self.reward}, ensure_ascii=False) + "\n"


async def ask(
    endpoint: Endpoint, task: Task, rows: Sequence[Row], seed: int, on_reply: Callable[[], None]
) -> list[Reply]:
    """Return the replies of both teachers to each question; `on_reply` is called after each reply.

    One request is sent at a time, because the requests to `transformers serve` share one state of random
    numbers, and a seed counts only while no other request is answered.
    """
    replies = []
    async with endpoint.connected() as connection:
        for number, row in enumerate(rows):
            prompts = {HINTED: prompt_with_answer(row), PLAIN: row["prompt"]}
            params = {HINTED: GREEDY, PLAIN: {**SAMPLED, "seed": seed + number}}
            for teacher in TEACHERS:
                message, finish_reason = await connection.answer(prompts[teacher], **params[teacher])
                reward = task.score(message["content"], row["answer"])
                replies.append(Reply(teacher, row["prompt"], message, finish_reason, reward))
                on_reply()
    return replies
