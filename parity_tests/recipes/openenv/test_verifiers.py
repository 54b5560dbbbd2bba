"""The environment through verifiers: its player on the real server, and the stamps on its traces."""

import asyncio
import tomllib
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verifiers.v1.tasksets.openenv", reason="verifiers is not installed")

import verifiers.v1 as vf  # noqa: E402
from verifiers.v1.graph import MessageNode  # noqa: E402
from verifiers.v1.trace import AgentInfo, Trace, TraceTask  # noqa: E402
from verifiers.v1.types import AssistantMessage, UserMessage  # noqa: E402
from verifiers.v1.utils.loaders import load_environment, resolve_env_config  # noqa: E402

from composer_plugins.recipes.openenv.tasks import make_tasks  # noqa: E402
from parity_tests.rigs.paths import ROOT  # noqa: E402

FOLDER = ROOT / "recipes" / "openenv"
TABLE = tomllib.loads((FOLDER / "prime_rl.toml").read_text())["orchestrator"]["train"]["source"][0]["env"]
TASK = make_tasks(0)[3]
WRONG = f"def {TASK.function}(a, b):\n    return -99"
HINT_TOKENS = [7, 7, 7]


@pytest.fixture
def env(url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The environment of prime_rl.toml as PRIME-RL makes it, with scores that depend on the hint."""
    monkeypatch.syspath_prepend(str(FOLDER))
    table = TABLE | {"taskset": TABLE["taskset"] | {"base_url": url}}
    made = load_environment(resolve_env_config(table))
    import env_deleted_function

    async def score(token_ids: list[int]) -> list[float]:
        asked.append(token_ids)
        return [-0.001 * token for token in token_ids]

    asked: list[list[int]] = []
    monkeypatch.setattr(env_deleted_function, "server", lambda url, model: score)
    made.tokens = lambda text: said.append(text) or HINT_TOKENS
    said: list[str] = []
    made.asked, made.said = asked, said
    return made


def play(env: Any, *replies: str) -> Any:
    """An episode of task 3, in which the player says these one after the other; its trace, finalized."""
    task = list(env.taskset)[3]
    info = AgentInfo(config=env.config.player)
    trace = Trace(task=TraceTask(type="OpenEnvTask", data=task.data), agent=info)
    left = list(replies)

    def add(message: Any, token_ids: list[int], **sampled: Any) -> None:
        parent, mask = len(trace.nodes) - 1 if trace.nodes else None, sampled.pop("mask", [False, False])
        trace.nodes.append(
            MessageNode(parent=parent, message=message, token_ids=token_ids, mask=mask, **sampled)
        )

    async def turn(message: str) -> Any:
        start, reply = 100 * len(trace.nodes), left.pop(0)
        add(UserMessage(content=message), [start, start + 1])
        own = {"sampled": True, "mask": [False, True, True], "logprobs": [-0.25, 0.0]}
        add(AssistantMessage(content=reply), [start + 2, start + 3, start + 4], **own)
        return SimpleNamespace(terminated=False, last_reply=reply)

    @asynccontextmanager
    async def interaction(task: Any) -> Any:
        yield SimpleNamespace(turn=turn, trace=trace)

    async def run() -> None:
        await env.run(task, SimpleNamespace(player=SimpleNamespace(interaction=interaction)))
        trace.ok = True
        await env.finalize(task, SimpleNamespace(traces=[trace]))

    asyncio.run(run())
    return trace


def references(trace: Any) -> list[Any]:
    return [node.reference_logprobs for node in trace.nodes if node.sampled]


def test_the_taskset_has_the_tasks_of_its_seed(env: Any) -> None:
    tasks = list(env.taskset)
    assert len(tasks) == len(make_tasks(0))
    assert [task.data.reset for task in tasks][3] == {"seed": 0, "task": 3}
    assert isinstance(env, vf.Env) and env.config.teacher_model == TABLE["teacher_model"]


def test_the_failed_turn_gets_the_teachers_log_probabilities_and_the_others_their_own(env: Any) -> None:
    trace = play(env, WRONG, TASK.solution)
    assert trace.reward == 0.5
    first, second = references(trace)
    assert first == pytest.approx([-0.003, -0.004])  # of tokens 3 and 4
    assert second == [-0.25, -1e-9]
    (asked,) = env.asked
    assert asked[:3] == HINT_TOKENS and asked[3:] == [t for node in trace.nodes for t in node.token_ids]
    case = TASK.cases[0]
    assert env.said[0].endswith(f"{TASK.call(case)} should be {case.expected}, but it is -99")


def test_an_episode_without_a_failed_attempt_is_not_stamped(env: Any) -> None:
    trace = play(env, TASK.solution)
    assert trace.reward == 1.0 and references(trace) == [None] and not env.asked


def test_an_evaluations_trace_is_not_stamped(env: Any) -> None:
    node = MessageNode(message=AssistantMessage(content=WRONG), sampled=True)
    trace = SimpleNamespace(ok=True, nodes=[node], branches=[SimpleNamespace(nodes=[node])])
    asyncio.run(env.finalize(None, SimpleNamespace(traces=[trace])))
    assert node.reference_logprobs is None and not env.asked
