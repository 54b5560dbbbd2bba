"""`rollout.name=recorded_cpu`: a rollout engine for verl that gives the replies of `first_step.py`."""

from typing import Any

from verl.workers.rollout.replica import TokenOutput

from composer_plugins.recipes.verl.on_a_cpu import rollout
from parity_tests.rigs.first_step import replies

NAME = "recorded_cpu"


class Recorded(rollout.Server):
    """A server that knows these prompts alone, and gives each of their replies once."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """Return the next reply to this prompt, with the model's log-probabilities."""
        async with self.lock:
            prompt = tuple(prompt_ids)
            known = [one.tokens for one in replies() if tuple(one.prompt) == prompt]
            tokens = known[self.asked[prompt]]
            self.asked[prompt] += 1
            return TokenOutput(
                token_ids=tokens,
                log_probs=[-1.0] * len(tokens),  # read by nothing: the actor computes its own
                stop_reason="completed",
                extra_fields={"global_steps": self.step},
            )


class Replica(rollout.Replica):
    """The handle of such a server."""

    server = Recorded


rollout.register(NAME, Replica)
