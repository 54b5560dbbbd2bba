"""reverse-text in pairs: two completions of each task, the better one preferred to the worse.

A verifiers environment, which PRIME-RL finds as the module `env_replay` (`PYTHONPATH=recipes/prime_rl`).
verifiers calls `finalize` after both completions are sampled and rewarded. Completions with equal rewards
make no pair, and the policy loss trains them.
"""

import asyncio

import verifiers.v1 as vf
from reverse_text.taskset import ReverseTextTaskset

from composer_plugins.adapters.prime_rl_plugin.stamps import check_trace, stamp_reference, stamp_replay_pair
from composer_plugins.recipes.prime_rl.scoring import scores_of, server

__all__ = ["PairEnv", "PairTaskset"]


class PairTaskset(ReverseTextTaskset):
    """The tasks of reverse-text as they are."""


class PairConfig(vf.EnvConfig):
    """[orchestrator.train.source.env]"""

    agent: vf.AgentConfig = vf.AgentConfig()
    reference_url: str = "http://localhost:8001"
    reference_model: str = ""
    beta: float = 0.1


class PairEnv(vf.Env[PairConfig]):
    """Two attempts, then a comparison."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(agents.agent.run(task))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        """Stamp DPO's coefficient on both completions, from log-probabilities of pi_ref and the policy."""
        if len(episode.traces) != 2 or not all(trace.ok for trace in episode.traces):
            return
        worse, better = sorted(episode.traces, key=lambda trace: trace.reward)
        chosen, rejected = ([node for node in x.nodes if any(node.mask)] for x in (better, worse))
        if better.reward == worse.reward or not (chosen and rejected):
            return  # no preference; or an evaluation, whose traces have no tokens
        reference = server(self.config.reference_url, self.config.reference_model)
        for scored in await asyncio.gather(*(scores_of(trace, reference) for trace in (better, worse))):
            for node, logprobs in scored:
                stamp_reference(node, logprobs)
        stamp_replay_pair(chosen, rejected, beta=self.config.beta)
        for trace in (better, worse):
            check_trace(trace)
