"""Ask every teacher for its action in every state, within a budget in USD.

    spent + the most that the requests in flight can cost <= max_usd

A request that does not fit waits until others have ended. The budget is that of the journal: what earlier
runs have spent counts.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import openai

from composer_plugins.errors import ConfigError, in_a_line
from composer_plugins.recipes.trace_replay import asking, logprobs
from composer_plugins.recipes.trace_replay.asking import Body, Unusable
from composer_plugins.recipes.trace_replay.journal import SCORE, Journal, Row
from composer_plugins.recipes.trace_replay.states import State
from composer_plugins.recipes.trace_replay.teachers import Teacher, check_teachers

# After this many requests in a row to which an endpoint gave no answer at all, the replay stops.
MOST_IN_A_ROW = 5
WRONG_ENTRY = {
    401: ("the key is not accepted", "set the right key in the environment variable that api_key_env names"),
    402: ("the account has no credit", "pay in, and run again"),
    403: ("this key may not use the model", "use another key, or another model"),
    404: ("there is no such model or address", "correct model or base_url"),
}


@dataclass
class Summary:
    """What a run has done. At its end `total` = answered_before + answered + failed + over_budget."""

    total: int = 0
    answered_before: int = 0  # in the journal already, and not asked again
    answered: int = 0
    failed: int = 0  # asked again by the next run; `Journal.failures` has the reasons
    over_budget: int = 0  # not asked, because the most that they can cost did not fit
    next_usd: float = 0.0  # of the requests that did not fit, the most that the cheapest can cost
    rest_usd: float = 0.0  # the most that all of them can cost
    interrupted: int = 0  # in flight when an earlier run ended: asked again, and counted as spent
    without_usage: int = 0  # answers that do not say what they cost: counted with the most they can cost
    spent_usd: float = 0.0  # by all runs with this journal

    @property
    def done(self) -> int:
        """How many requests have an answer, a failure or no budget."""
        return self.answered_before + self.answered + self.failed + self.over_budget

    def remarks(self) -> list[str]:
        """What a person should know beside the numbers, a sentence each."""
        said = []
        if self.interrupted:
            said.append(
                f"requests in flight when an earlier run ended: {self.interrupted}; they are sent again with "
                "the same Idempotency-Key, and what they may have cost counts as spent"
            )
        if self.over_budget:
            said.append(
                f"requests that did not fit the budget: {self.over_budget}; set --max-usd "
                f"{_rounded_up(self.spent_usd + self.next_usd)} to send the next one, and about "
                f"{_rounded_up(self.spent_usd + self.rest_usd)} to send all of them"
            )
        if self.without_usage:
            said.append(
                f"answers that do not say what they cost: {self.without_usage}; they count with the most "
                "they can cost"
            )
        return said


def _rounded_up(usd: float) -> str:
    return f"{math.ceil(usd * 1e6 + 1e-6) / 1e6:.6f}"


class _Job(NamedTuple):
    """One row of the journal: the requests that fill it, and the most that they can cost."""

    row: Row
    teacher: Teacher
    bodies: list[Body]
    most_usd: float


async def replay(
    states: Sequence[State],
    teachers: Sequence[Teacher],
    journal: Journal,
    *,
    samples: int,
    concurrency: int,
    max_usd: float,
    on_progress: Callable[[Summary], None] = lambda summary: None,
) -> Summary:
    """Ask every teacher `samples` times in every state, unless the journal has the answer.

    A teacher with `logprobs: prompt` also scores each observed action. Cancelling keeps the answers that have
    arrived. Raises ConfigError where asking on makes no sense: a wrong key, an unknown model, an endpoint
    that does not answer.
    """
    check_options(teachers, samples=samples, concurrency=concurrency, max_usd=max_usd)
    if not all(teacher.is_free for teacher in teachers):
        for state in states:
            asking.check_is_text(state)
    journal.check_teachers(teachers)
    async with AsyncExitStack() as stack:
        clients = {t.name: await stack.enter_async_context(asking.client_of(t)) for t in teachers}
        run = _Run(states, teachers, samples, journal, clients, max_usd, on_progress)
        jobs = run.jobs()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(run.work(jobs))
        except ExceptionGroup as errors:  # a journal that cannot be written, for one
            raise errors.exceptions[0] from None
    if run.stopped_by is not None:
        raise run.stopped_by
    return run.summary


def check_options(teachers: Sequence[Teacher], *, samples: int, concurrency: int, max_usd: float) -> None:
    """Raise ConfigError for options with which nothing can be asked."""
    check_teachers(list(teachers))
    for name, value in (("--samples", samples), ("--concurrency", concurrency)):
        if value < 1:
            raise ConfigError(name, f"it is {value}", "set a number of at least 1")
    if not (math.isfinite(max_usd) and max_usd >= 0):
        raise ConfigError("--max-usd", f"it is {max_usd}", "set the most that the teachers may cost, in USD")
    priced = [teacher.name for teacher in teachers if not teacher.is_free]
    if max_usd == 0 and priced:
        problem = f"it is 0, and teacher {priced[0]!r} has a price"
        raise ConfigError("--max-usd", problem, "set a budget above 0, or ask free teachers only")


class _Run:
    """What the workers of a replay share."""

    def __init__(
        self,
        states: Sequence[State],
        teachers: Sequence[Teacher],
        samples: int,
        journal: Journal,
        clients: dict[str, openai.AsyncOpenAI],
        max_usd: float,
        on_progress: Callable[[Summary], None],
    ) -> None:
        self.journal, self.clients, self.max_usd, self.on_progress = journal, clients, max_usd, on_progress
        self.stopped_by: ConfigError | None = None
        self.in_flight, self.in_flight_usd = 0, 0.0  # requests, and the most that they can cost
        self.has_ended = asyncio.Condition()  # notified when a request has ended
        self.silent = dict.fromkeys(clients, 0)  # by teacher, requests in a row without any answer
        wanted = _wanted(states, teachers, samples)
        done = journal.answered()
        self.wanted = {row: task for row, task in wanted.items() if row not in done}
        self.summary = Summary(len(wanted), len(wanted) - len(self.wanted), spent_usd=journal.spent())
        self.summary.interrupted = journal.interrupted
        self.report()

    def jobs(self) -> Iterator[_Job]:
        """The requests to send, one state after the other: a small budget then answers whole states."""
        for row, (state, teacher) in self.wanted.items():
            if row[2] == SCORE:
                bodies = logprobs.score_bodies(state, teacher)
            else:
                bodies = [asking.chat_body(state, teacher)]
            yield _Job(row, teacher, bodies, sum(asking.most_usd(teacher, body) for body in bodies))

    async def work(self, jobs: Iterator[_Job]) -> None:
        """Send requests, one at a time, until there are no more or the replay stops."""
        for job in jobs:
            has_room = await self.has_room(job.most_usd)
            if self.stopped_by is not None:
                return
            if has_room:
                await self.ask(job)
            else:
                first = self.summary.over_budget == 0
                self.summary.next_usd = job.most_usd if first else min(self.summary.next_usd, job.most_usd)
                self.summary.rest_usd += job.most_usd
                self.summary.over_budget += 1
            self.report()

    async def has_room(self, usd: float) -> bool:
        """Whether the budget has room for a request; waits for requests in flight that may leave some."""

        def fits(spent: float) -> bool:
            return spent + usd <= self.max_usd

        def is_decided() -> bool:
            spent = self.journal.spent()
            can_fit = fits(spent - self.in_flight_usd)
            return self.stopped_by is not None or fits(spent) or not (can_fit and self.in_flight)

        async with self.has_ended:
            await self.has_ended.wait_for(is_decided)
        return fits(self.journal.spent())

    async def ask(self, job: _Job) -> None:
        """Send the requests of a job, and record the answer, or the reason why there is none."""
        # Nothing else has run since the check of the budget, so the room is still there.
        key = self.journal.mark(job.row, job.most_usd)
        self.in_flight, self.in_flight_usd = self.in_flight + 1, self.in_flight_usd + job.most_usd
        costs: list[float] = []
        try:
            answers = [await self.post(job, number, key, costs) for number in range(len(job.bodies))]
            self.keep(job, answers, sum(costs))
        except openai.APIStatusError as error:
            reason = f"status {error.status_code}: {asking.shown(error.response.text)}"
            self.fail(job, reason, costs[:-1], was_answered=True)
            self.check_refusal(job.teacher, error.status_code)
        except asking.NoAnswer as error:
            self.fail(job, str(error), costs, was_answered=False)
            self.check_silence(job.teacher, f"{error}", "set a longer timeout, or start the endpoint again")
        except openai.APIConnectionError as error:
            reason = f"no connection to {job.teacher.base_url} ({in_a_line(error.__cause__ or error)})"
            self.fail(job, reason, costs[:-1], was_answered=False)
            self.check_silence(job.teacher, reason, "start the endpoint, or correct base_url")
        except UnicodeEncodeError:
            self.fail(job, "the state has half of a surrogate pair", costs[:-1], was_answered=False)
        except Unusable as error:
            self.fail(job, str(error), costs, was_answered=True)
        except ConfigError as error:
            self.fail(job, error.problem, costs, was_answered=True)
            self.stopped_by = self.stopped_by or error
        finally:
            self.in_flight, self.in_flight_usd = self.in_flight - 1, self.in_flight_usd - job.most_usd
            async with self.has_ended:
                self.has_ended.notify_all()

    async def post(self, job: _Job, number: int, key: str, costs: list[float]) -> dict[str, Any]:
        """Send one request of a job, and put what counts as spent for it at the end of `costs`."""
        teacher, body = job.teacher, job.bodies[number]
        costs.append(asking.most_usd(teacher, body))
        text = await asking.post(self.clients[teacher.name], body, f"{key}-{number}" if number else key)
        self.silent[teacher.name] = 0
        answer = asking.read_json(text)
        usage = asking.read_usage(answer)
        if usage is not None:
            most, costs[-1] = costs[-1], teacher.usd(usage.prompt_tokens, usage.completion_tokens)
            if costs[-1] > most and self.stopped_by is None:
                problem = (
                    f"a request was billed {costs[-1]:g} USD, and can cost at most {most:g} with its limit"
                )
                remedy = "ask an endpoint that keeps to the limit of tokens, because the budget counts on it"
                self.stopped_by = ConfigError(f"teacher {teacher.name!r}", problem, remedy)
        elif not teacher.is_free:
            self.summary.without_usage += 1
        return answer

    def keep(self, job: _Job, answers: list[dict[str, Any]], usd: float) -> None:
        """Record an answer; raises Unusable or ConfigError for one that cannot be used."""
        if job.row[2] == SCORE:
            before, whole = answers
            score = logprobs.read_score(before, whole, job.teacher)
            self.journal.answer(job.row, usd=usd, logprobs=score)
        else:
            reply, usage = asking.read_reply(answers[0]), asking.read_usage(answers[0])
            tokens = usage.model_dump() if usage is not None else {}
            self.journal.answer(
                job.row, usd=usd, message=reply.message, finish_reason=reply.finish_reason, **tokens
            )
        self.summary.answered += 1

    def fail(self, job: _Job, reason: str, costs: Sequence[float], *, was_answered: bool) -> None:
        """Record why a request brought no answer."""
        self.journal.fail(job.row, usd=sum(costs), error=reason, was_answered=was_answered)
        self.summary.failed += 1

    def check_refusal(self, teacher: Teacher, status: int) -> None:
        """Stop where every request of a teacher would be refused."""
        if status in WRONG_ENTRY:
            problem, remedy = WRONG_ENTRY[status]
            problem = f"{teacher.base_url} answers {status} for the model {teacher.model!r}: {problem}"
            self.stopped_by = self.stopped_by or ConfigError(f"teacher {teacher.name!r}", problem, remedy)
        elif status == 429 or status >= 500:
            self.check_silence(teacher, f"status {status}", "run again later, or with a lower --concurrency")

    def check_silence(self, teacher: Teacher, reason: str, remedy: str) -> None:
        """Stop after MOST_IN_A_ROW requests in a row without any answer."""
        self.silent[teacher.name] += 1
        if self.silent[teacher.name] >= MOST_IN_A_ROW and self.stopped_by is None:
            problem = f"{MOST_IN_A_ROW} requests in a row had no answer: {reason}"
            self.stopped_by = ConfigError(f"teacher {teacher.name!r}", problem, remedy)

    def report(self) -> None:
        """Call `on_progress`."""
        self.summary.spent_usd = self.journal.spent()
        self.on_progress(replace(self.summary))


def _wanted(
    states: Sequence[State], teachers: Sequence[Teacher], samples: int
) -> dict[Row, tuple[State, Teacher]]:
    """The rows that the journal should have. Traces that share a state share its answers."""
    rows = dict[Row, tuple[State, Teacher]]()
    for state in states:
        for teacher in teachers:
            for sample in range(samples):
                rows.setdefault((state.id, teacher.name, sample), (state, teacher))
            if teacher.logprobs is not None:
                rows.setdefault((logprobs.scored_id(state), teacher.name, SCORE), (state, teacher))
    return rows
