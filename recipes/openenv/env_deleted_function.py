"""The same environment for PRIME-RL: verifiers plays its episodes, and the turn that failed gets the hint.

verifiers plays the episodes of any OpenEnv server (`verifiers.v1.tasksets.openenv`). PRIME-RL finds this
module as `env-deleted-function` (`PYTHONPATH=recipes/openenv`). Then the policy's own server scores
the completion again, with the first failing test before the conversation.
"""

import json
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.tasksets.openenv import (
    OpenEnvConfig,
    OpenEnvEnv,
    OpenEnvEnvConfig,
    OpenEnvTask,
    OpenEnvTaskset,
)

from composer_plugins.adapters.prime_rl_plugin.stamps import check_trace, stamp_reference
from composer_plugins.recipes.openenv.tasks import make_tasks
from composer_plugins.recipes.prime_rl.scoring import Score, scores_of, server, system_tokens

__all__ = ["DeletedFunctionEnv", "DeletedFunctionTaskset"]

HINT = "The first attempt at the function failed this test: {error}"
CERTAIN = -1e-9  # a reference of exactly 0.0 means to PRIME-RL that there is none


class TasksetConfig(OpenEnvConfig):
    """[orchestrator.train.source.env.taskset], id = "env-deleted-function", base_url = "http://..." """

    seed: int = 0


class DeletedFunctionTaskset(OpenEnvTaskset, vf.Taskset[OpenEnvTask, TasksetConfig]):
    """The tasks of a seed, on the server at `base_url`."""

    def __init__(self, config: TasksetConfig) -> None:
        resets = [{"seed": config.seed, "task": task} for task in range(len(make_tasks(config.seed)))]
        super().__init__(config.model_copy(update={"resets": resets}))


class EnvConfig(OpenEnvEnvConfig):
    """[orchestrator.train.source.env]: the policy's own server scores as the teacher."""

    teacher_url: str = "http://localhost:8000"
    teacher_model: str = ""


class DeletedFunctionEnv(OpenEnvEnv, vf.Env[EnvConfig]):
    """verifiers' player of OpenEnv's episodes, with stamps."""

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        """Stamp every completion that has a failed attempt."""
        for trace in episode.traces:
            if trace.ok and any(any(node.mask) for node in trace.nodes):  # an evaluation's has no tokens
                await stamp(trace, server(self.config.teacher_url, self.config.teacher_model), self.tokens)

    def tokens(self, text: str) -> list[int]:
        """The tokens of a system message, which the teacher sees before the conversation."""
        return system_tokens(self.config.teacher_model, text)


async def stamp(trace: Any, score: Score, tokens: Any) -> None:
    """Stamp the failed turn with the log-probabilities of the teacher, who sees the failing test.

    PRIME-RL wants a reference on all sampled tokens of a branch, or on none. The other turns get the policy's
    own log-probabilities, with which the loss of the hint is 0 when they are sampled.
    """
    failed, error = first_failure(trace)
    if failed is None:
        return
    for node, logprobs in await scores_of(trace, score, tokens(HINT.format(error=error))):
        stamp_reference(node, logprobs if node is failed else [min(x, CERTAIN) for x in node.logprobs])
    check_trace(trace)


def first_failure(trace: Any) -> tuple[Any, str]:
    """The turn of the first failed attempt and its failing test; (None, "") if there is none.

    verifiers shows an observation as JSON in the user's next message.
    """
    for branch in trace.branches:
        for node, following in zip(branch.nodes, branch.nodes[1:], strict=False):
            if node.sampled and (error := error_of(following.message)):
                return node, error
    return None, ""


def error_of(message: Any) -> str:
    """The failing test in a message of the environment; "" if there is none."""
    try:
        return str(json.loads(message.content)["observation"]["error"])
    except (TypeError, ValueError, KeyError, AttributeError):
        return ""
