"""Ask every teacher for its action in every state, within a budget in USD.

    spent + the most that the requests in flight can cost <= max_usd

A request that does not fit waits until others have ended. The budget is that of the journal: what earlier
runs have spent counts.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import openai

from composer_plugins.errors import ConfigError, in_a_line
from composer_plugins.recipes.trace_replay import request
from composer_plugins.recipes.trace_replay.journal import Answer, Failure, Journal, Row
from composer_plugins.recipes.trace_replay.request import Body, Unusable
from composer_plugins.recipes.trace_replay.states import State, canonical
from composer_plugins.recipes.trace_replay.teachers import Teacher

# After this many requests in a row to which an endpoint gave no answer at all, the replay stops.
MOST_IN_A_ROW = 5
FORBIDDEN = 403  # the key is wrong, or the endpoint refuses this prompt
ENTRY = "correct the key, the model or base_url in --teachers"
REMEDIES = {401: ENTRY, 402: "add credits to the account of the key, and run again", 404: ENTRY}
REMEDIES |= {FORBIDDEN: f"{ENTRY}, or run the same command again"}


@dataclass
class Summary:
    """What a run has done. At its end `total` = answered_before + answered + failed + over_budget."""

    total: int = 0
    answered_before: int = 0  # in the journal already, and not asked again
    answered: int = 0
    failed: int = 0  # asked again by the next run; `Journal.failures` has the reasons
    first_failure: str = ""  # its teacher and reason
    over_budget: int = 0  # not asked, because the most that they can cost did not fit
    rest_usd: float = 0.0  # the most that these can cost
    without_usage: int = 0  # answers that do not say what they cost: counted with the most they can cost
    above_reserved: int = 0  # requests that cost more than was reserved for them
    spent_usd: float = 0.0  # by all runs with this journal

    @property
    def done(self) -> int:
        """How many requests have an answer, a failure or no budget."""
        return self.answered_before + self.answered + self.failed + self.over_budget


class _Job(NamedTuple):
    """A request: the row of the journal that it fills, its Idempotency-Key, and the most that it can cost."""

    row: Row
    teacher: Teacher
    body: Body
    key: str
    most_usd: float
    has_failed: bool  # in an earlier run


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

    Cancelling keeps the answers that have arrived. Raises ConfigError where asking on makes no sense: a wrong
    key, an unknown model, an endpoint that does not answer.
    """
    # Traces that share a state share its answers. A small budget answers whole states.
    wanted: dict[Row, tuple[State, Teacher]] = {
        (state.id, teacher.name, sample): (state, teacher)
        for state in states
        for teacher in teachers
        for sample in range(samples)
    }
    answered, failed = {answer.row for answer in journal.answers()}, journal.failed()
    jobs = (_job(row, *task, failed[row]) for row, task in wanted.items() if row not in answered)
    summary = Summary(total=len(wanted), answered_before=len(wanted.keys() & answered))
    async with request.Client() as http:
        clients = {teacher.name: request.client_of(teacher, http) for teacher in teachers}
        run = _Run(journal, clients, max_usd, on_progress, summary, {teacher for _, teacher, _ in answered})
        run.report()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(run.work(jobs))
        except ExceptionGroup as errors:  # a journal that cannot be written, for one
            raise errors.exceptions[0] from None
    if run.stopped_by is not None:
        raise run.stopped_by
    return summary


def _job(row: Row, state: State, teacher: Teacher, failed: int) -> _Job:
    body = request.chat_body(state, teacher)
    # The key is the same one after a kill, and another one after a failure that is recorded.
    key = hashlib.sha256(canonical([*row, failed, body]).encode()).hexdigest()[:32]
    return _Job(row, teacher, body, key, request.most_usd(teacher, body), failed > 0)


@dataclass
class _Run:
    """What the workers of a replay share."""

    journal: Journal
    clients: dict[str, openai.AsyncOpenAI]  # by teacher
    max_usd: float
    on_progress: Callable[[Summary], None]
    summary: Summary
    have_answered: set[str]  # the teachers that have answered, in any run
    stopped_by: ConfigError | None = None
    in_flight: list[float] = field(default_factory=list)  # the most that each request can cost
    has_ended: asyncio.Condition = field(default_factory=asyncio.Condition)  # notified when a request has
    silent: Counter[str] = field(default_factory=Counter)  # by teacher, requests in a row without any answer

    async def work(self, jobs: Iterator[_Job]) -> None:
        """Send requests, one at a time, until there are no more or the replay stops."""
        for job in jobs:
            if await self.reserve(job.most_usd):
                try:
                    await self.ask(job)
                finally:
                    self.in_flight.remove(job.most_usd)
                    async with self.has_ended:
                        self.has_ended.notify_all()
            elif self.stopped_by is None:
                self.summary.over_budget += 1
                self.summary.rest_usd += job.most_usd
            if self.stopped_by is not None:
                return
            self.report()

    async def reserve(self, usd: float) -> bool:
        """Whether the budget has room for a request; waits for requests in flight, which may leave some."""

        def fits() -> bool:
            return self.journal.spent + sum(self.in_flight) + usd <= self.max_usd

        async with self.has_ended:
            await self.has_ended.wait_for(lambda: fits() or not self.in_flight or self.stopped_by)
            is_sent = fits() and self.stopped_by is None
            if is_sent:
                self.in_flight.append(usd)
        return is_sent

    async def ask(self, job: _Job) -> None:
        """Send a request, and record its answer or the reason why there is none."""
        teacher = job.teacher
        try:
            text = await request.post(self.clients[teacher.name], job.body, job.key)
        except openai.APIStatusError as error:
            reason = f"status {error.status_code}: {request.shown(error.response.text)}"
            self.fail(job, reason, usd=0.0)  # a refused request costs nothing
            is_one_prompt = job.has_failed or teacher.name in self.have_answered
            if error.status_code in REMEDIES and not (error.status_code == FORBIDDEN and is_one_prompt):
                problem = f"{teacher.base_url} answers for the model {teacher.model!r} with {reason}"
                self.stop(teacher, problem, REMEDIES[error.status_code])
            elif error.status_code == 429 or error.status_code >= 500:
                self.count_silence(teacher, reason)
        except openai.APIConnectionError as error:
            reason = f"no connection to {teacher.base_url} ({in_a_line(error.__cause__ or error)})"
            self.fail(job, reason, usd=0.0)
            self.count_silence(teacher, reason)
        except request.NoAnswer as error:
            self.fail(job, str(error), usd=job.most_usd)
            self.count_silence(teacher, str(error))
        else:
            self.silent[teacher.name] = 0
            self.have_answered.add(teacher.name)
            self.record(job, text)

    def record(self, job: _Job, text: str) -> None:
        """Record an answer that has arrived, or why it cannot be used."""
        usd, tokens = job.most_usd, dict[str, Any]()
        try:
            data = request.read_answer(text)
            if (usage := request.read_usage(data)) is not None:
                tokens = usage.model_dump()
                usd = job.teacher.usd(**tokens)
                if job.teacher.prices is not None and usage.cost is not None:
                    usd = usage.cost
                self.summary.above_reserved += usd > job.most_usd
            elif usd > 0:
                self.summary.without_usage += 1
            reply = request.read_reply(data)
        except Unusable as error:
            self.fail(job, str(error), usd=usd)
        else:
            self.journal.add(Answer(*job.row, usd, reply.message, reply.finish_reason, **tokens))
            self.summary.answered += 1

    def fail(self, job: _Job, reason: str, *, usd: float) -> None:
        """Record why a request brought no answer, and what it may have cost."""
        self.journal.add(Failure(*job.row, usd, reason))
        self.summary.failed += 1
        self.summary.first_failure = self.summary.first_failure or f"teacher {job.teacher.name!r}, {reason}"

    def count_silence(self, teacher: Teacher, reason: str) -> None:
        """Stop after MOST_IN_A_ROW requests in a row without any answer."""
        self.silent[teacher.name] += 1
        if self.silent[teacher.name] >= MOST_IN_A_ROW:
            problem = f"{MOST_IN_A_ROW} requests in a row had no answer: {reason}"
            self.stop(teacher, problem, "start the endpoint again, set a longer timeout, or run again later")

    def stop(self, teacher: Teacher, problem: str, remedy: str) -> None:
        """Let the workers end, and `replay` raise this error."""
        self.stopped_by = self.stopped_by or ConfigError(f"teacher {teacher.name!r}", problem, remedy)

    def report(self) -> None:
        """Call `on_progress`."""
        self.summary.spent_usd = self.journal.spent
        self.on_progress(replace(self.summary))
