"""The options of a loss or an estimator are parsed once, or after a change, and a process loads little."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from composer_plugins.adapters.verl_plugin.config import ComposerPolicyLossConfig
from composer_plugins.adapters.verl_plugin.estimators import estimator
from composer_plugins.adapters.verl_plugin.loss import policy_loss
from composer_plugins.batches import steps
from composer_plugins.comparing import Step
from composer_plugins.errors import ConfigError
from parity_tests.rigs.calls import calls
from parity_tests.rigs.loaded import check_loaded
from parity_tests.rigs.verl_actor import composer_actor

# What reads options, of verl or of ours, and what looks a loss up.
READS = ("moved", "node_of", "asked_in_a_run", "ComposerConfig.parse", "choose")
Loss = Callable[..., tuple[Tensor, dict[str, float]]]


def config_of(**params: float) -> Any:
    """An actor's config with our loss, as verl's worker makes it."""
    counts = {"dp_size": 1, "batch_num_tokens": 8, "global_batch_size": 2}
    return composer_actor({"policy": "grpo@verl", "policy_params": params}, counts)


def called(loss: Loss, config: Any, mode: str = "token-mean") -> float:
    """The loss of one micro-batch, in which every token's ratio is 1.25 and its advantage 1."""
    ones = torch.ones(2, 4)
    tensors = {"old_log_prob": -ones, "log_prob": -ones + torch.log(1.25 * ones)}
    tensors |= {"advantages": ones, "response_mask": ones}
    return float(loss(**tensors, loss_agg_mode=mode, config=config)[0])


@pytest.fixture
def loss() -> Loss:
    """The loss mode `composer` as a new process registers it."""
    return policy_loss(None)


def test_a_micro_batch_after_the_first_reads_its_counts_and_no_option(loss: Loss) -> None:
    config = config_of(clip_high=0.28)
    first = calls(lambda: called(loss, config))
    assert all(first[name] for name in READS), first
    before = called(loss, config)
    config.global_batch_info["batch_num_tokens"] = 16  # verl writes the counts of each micro-batch into it
    found = calls(lambda: called(loss, config))
    assert not [name for name in READS if found[name]], found
    assert sum(found.values()) <= 80, found.most_common()
    assert called(loss, config) == before / 2


def test_an_option_that_is_changed_in_place_is_read_anew(loss: Loss) -> None:
    config = config_of(clip_high=0.1)
    assert called(loss, config) == pytest.approx(-1.1)
    config.policy_loss.composer["policy_params"]["clip_high"] = 0.15
    assert called(loss, config) == pytest.approx(-1.15)
    object.__setattr__(config, "clip_ratio_high", 0.15)  # verl's config refuses a plain assignment
    with pytest.raises(ConfigError, match="verl reads it for its own losses, and 'grpo' does not"):
        called(loss, config)
    object.__setattr__(config, "clip_ratio_high", 0.2)
    object.__setattr__(config, "policy_loss", ComposerPolicyLossConfig(composer={"policy": "dapo"}))
    assert called(loss, config) == pytest.approx(-1.25)


def test_a_mapping_in_place_of_verls_dataclass_is_read_anew_after_a_change(loss: Loss) -> None:
    node = {"policy": "grpo@verl", "policy_params": {"clip_high": 0.1}}
    config = OmegaConf.create({"policy_loss": {"composer": node}, "global_batch_info": {}})
    assert called(loss, config) == pytest.approx(-1.1)
    config.policy_loss.composer.policy_params.clip_high = 0.2
    assert called(loss, config) == pytest.approx(-1.2)


def test_another_config_or_mode_is_parsed_for_itself(loss: Loss) -> None:
    values = [called(loss, config_of(clip_high=high)) for high in (0.1, 0.15, 0.1)]
    assert values == pytest.approx([-1.1, -1.15, -1.1])
    config = config_of(clip_high=0.28)
    called(loss, config)
    assert called(loss, config, "token-sum") == 4 * called(loss, config, "seq-mean-token-mean") * 2
    with pytest.raises(ValueError, match="sum-nrom"):
        called(loss, config, "sum-nrom")


def test_an_estimator_parses_its_options_at_its_first_step_only() -> None:
    advantages = estimator(None)
    config = OmegaConf.create({"composer": {"advantage": "grpo@verl"}, "norm_adv_by_std_in_grpo": True})
    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0]])

    def step() -> Tensor:
        return advantages(rewards, torch.ones(2, 2), index=["a", "a"], config=config)[0]

    first = calls(step)
    assert (first["asked_in_a_run"], first["ComposerConfig.parse"]) == (1, 1), first
    found = calls(step)
    assert not [name for name in READS if found[name]], found
    scaled = step()
    config.composer.advantage_params = {"scale": "none"}
    assert not torch.equal(step(), scaled)
    assert step().tolist() == [[-1.0, -1.0], [1.0, 1.0]]


def test_every_process_loads_little_of_ours() -> None:
    check_loaded("adapters.verl_plugin.register", "verl", 9_900)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_loss_of_a_record_is_the_loss_that_verl_gets(loss: Loss, mode: str, tmp_path: Path) -> None:
    counts = {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 8, "loss_scale_factor": 4}
    node = {"policy": "grpo@verl", "record_batches": str(tmp_path)}
    config = composer_actor(node, counts)
    for _ in range(3):
        value = called(loss, config, mode)
    assert steps(tmp_path) == [0, 1]  # of eight rows on two ranks, two in each call
    found = Step.read(tmp_path).reproduced()
    assert found is not None and found["equal"] and found["recomputed"] == pytest.approx(value, rel=1e-6)
