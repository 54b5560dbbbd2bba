"""`composer-plugins migrate` from and to verl: its defaults, its own checks, and what `ppo_loss` trains."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import verl
import yaml
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

from composer_plugins.adapters.verl_plugin import migration
from composer_plugins.adapters.verl_plugin.config import ComposerPolicyLossConfig
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import nested
from composer_plugins.config import at
from composer_plugins.frameworks.verl import Key
from composer_plugins.losses.choosing import choose
from composer_plugins.objective.objective import of_choice
from composer_plugins.objective.resolve import migrate, resolve
from parity_tests.rigs.moved_losses import Batch, assert_trains, batch, every, expected, moved

TREES = sorted((Path(verl.__file__).parent / "trainer" / "config").glob("_generated_ppo_*.yaml"))


@pytest.mark.parametrize("file", TREES, ids=lambda file: file.stem)
def test_verls_own_defaults_are_read_and_nothing_of_them_differs(file: Path) -> None:
    tree = yaml.safe_load(file.read_text())
    tree["algorithm"]["adv_estimator"] = "grpo"
    read = resolve("verl", tree)
    assert migrate(read.required(), "verl").differences == ()


def test_omegaconf_calls_the_value_missing_that_stands_for_a_policy_loss() -> None:
    orchestrator = {"algo": {"type": "opd"}, "group_size": 8}
    found = migrate(resolve("prime-rl", {"orchestrator": orchestrator}).required(), "verl")
    config = OmegaConf.create(found.text)
    assert config.actor_rollout_ref.rollout.n == 8
    assert OmegaConf.missing_keys(config) == {"algorithm.composer.policy"}


def test_verl_takes_the_threshold_of_a_mask_without_a_lower_bound() -> None:
    mask = choose("correction", "mis", {"high": 3.0, "log_ratio_clamp": 20.0})
    objective = replace(of_choice(choose("policy", "grpo@verl")), correction=mask)
    written = migration.write(objective)
    upper, lower = _parse_rollout_is_threshold(at(written, f"{Key.CORRECTION}.rollout_is_threshold"))
    assert upper == 3.0 and lower is not None and 0 < lower < math.exp(-20)
    read = migration.read(written)[0].correction
    assert read is not None and read.value("low") is None and read.value("high") == 3.0


def value_and_gradient(table: Mapping[str, Any], given: Batch) -> tuple[Tensor, Tensor]:
    """The loss of `ppo_loss`, which calls verl's registry, with a config that `migrate` wrote."""
    actor = dict(table["actor_rollout_ref"]["actor"])
    own = {key: value for key, value in actor.pop("policy_loss").items() if key != "_target_"}
    policy_loss = ComposerPolicyLossConfig(**own | {"composer": table["algorithm"]["composer"]})
    sizes = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    config = ActorConfig(policy_loss=policy_loss, **sizes, **actor)
    bypass = table["algorithm"].get("rollout_correction", {}).get("bypass_mode")
    rows = [slice(0, int(row.nonzero().max()) + 1) for row in given.mask]  # verl has no padding here

    def ragged(x: Tensor) -> list[Tensor]:
        return [x[i, cut].contiguous() for i, cut in enumerate(rows)]

    mask = [one.long() for one in ragged(given.mask)]
    fields = {
        "prompts": [torch.zeros(1, dtype=torch.long)] * len(rows),
        "responses": [torch.zeros_like(one) for one in mask],
        "response_mask": mask,
        "old_log_probs": ragged(given.rollout if bypass else given.old),
        "advantages": ragged(given.advantages),
    }
    data = TensorDict({name: nested(values) for name, values in fields.items()}, batch_size=len(rows))
    counts = {"dp_size": 1, "batch_num_tokens": int(given.mask.sum()), "global_batch_size": len(rows)}
    tensordict_utils.assign_non_tensor(data, **counts)
    logprobs = given.logprobs.clone().requires_grad_()
    # verl's model gives one number per token of prompt and response; the last one belongs to no token.
    packed = [torch.cat([logprobs[i, cut], logprobs.new_zeros(1)]) for i, cut in enumerate(rows)]
    offsets = torch.tensor([0, *(len(one) for one in packed)]).cumsum(0)
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(torch.cat(packed), offsets)}
    loss, _ = ppo_loss(config, output, data)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


@pytest.mark.filterwarnings("ignore:.*is reduced by")
@pytest.mark.parametrize("name", every("verl"))
def test_verl_trains_what_was_written(name: str) -> None:
    for written, objective in moved("verl", name):
        given = batch(nan=True)
        assert_trains(*value_and_gradient(written.table, given), expected(objective, given))
