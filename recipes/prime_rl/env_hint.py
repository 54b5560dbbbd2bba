"""reverse-text with a hint: the policy's own server scores each completion with the answer in its prompt.

A verifiers taskset, which PRIME-RL finds as the module `env_hint` (`PYTHONPATH=recipes/prime_rl`). verifiers
calls `finalize` after the completion is sampled and before it is rewarded. For another task change `HINT` and
the taskset.
"""

import verifiers.v1 as vf
from reverse_text.taskset import ReverseTextConfig, ReverseTextData, ReverseTextTask, ReverseTextTaskset

from composer_plugins.adapters.prime_rl_plugin.stamps import check_trace, stamp_reference
from composer_plugins.recipes.prime_rl.scoring import scores_of, server, system_tokens

__all__ = ["HintTaskset"]

HINT = "The right answer, which the user does not see, is:\n{answer}"


class HintTaskConfig(vf.TaskConfig):
    """[orchestrator.train.source.env.taskset.task]"""

    teacher_url: str = "http://localhost:8000"
    teacher_model: str = ""


class HintConfig(ReverseTextConfig):
    """The options of reverse-text, and the teacher."""

    task: HintTaskConfig = HintTaskConfig()


class HintTask(ReverseTextTask, vf.Task[ReverseTextData, vf.State, HintTaskConfig]):
    """reverse-text's task and reward, with a teacher."""

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Stamp the log-probabilities of the sampled tokens under the teacher, who sees the answer."""
        if not any(any(node.mask) for node in trace.nodes):
            return  # an evaluation's trace has no tokens
        model = self.config.teacher_model
        hint = system_tokens(model, HINT.format(answer=self.data.answer))
        for node, logprobs in await scores_of(trace, server(self.config.teacher_url, model), hint):
            stamp_reference(node, logprobs)
        check_trace(trace)


class HintTaskset(ReverseTextTaskset, vf.Taskset[HintTask, HintConfig]):
    """[orchestrator.train.source.env.taskset], id = "env-hint"."""

    def load(self) -> list[HintTask]:
        return [HintTask(task.data, self.config.task) for task in super().load()]
