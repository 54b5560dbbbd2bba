"""`composer-plugins migrate --from trl`: what is said of configs in the style of TRL's examples."""

from typing import Any, NamedTuple

import pytest

from composer_plugins.objective.resolve import migrate, resolve

USUAL: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-4B",
    "dataset_name": "trl-lib/DeepMath-103K",
    "learning_rate": 1e-6,
    "num_generations": 8,
    "max_completion_length": 1024,
    "gradient_accumulation_steps": 4,
    "report_to": ["wandb"],
    "use_peft": True,
}
VLLM = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}


class Config(NamedTuple):
    """A config, and the words that its answer must have; none where TRL itself gets the same loss back."""

    name: str
    changes: dict[str, Any]
    named: tuple[str, ...] = ()


CONFIGS = (
    Config("grpo", {}),
    Config("grpo as in the paper", {"loss_type": "grpo", "beta": 0.04}),
    Config(
        "dapo",
        {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True},
        ("truncated",),
    ),
    Config("dapo on vLLM", {"loss_type": "dapo", "epsilon_high": 0.28, **VLLM}),
    Config("dr_grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    Config("bnpo", {"loss_type": "bnpo"}),
    Config("gspo", {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}),
    Config("cispo", {"loss_type": "cispo", "epsilon_high": 5.0}),
    Config("sapo", {"loss_type": "sapo", "sapo_temperature_neg": 1.05}),
    Config("two-sided", {"delta": 4.0}),
    Config("tokens of high entropy", {"top_entropy_quantile": 0.2}, ("top_entropy_quantile",)),
    Config("two rewards", {"reward_weights": [1.0, 0.5]}, ("reward_weights",)),
    Config("a reference that moves", {"beta": 0.1, "sync_ref_model": True}, ("sync_ref_model",)),
    Config("masked sequences", {**VLLM, "vllm_importance_sampling_mode": "sequence_mask"}),
    Config("nucleus sampling", {"top_p": 0.9, **VLLM}, ("top_p",)),
    Config("several iterations", {"num_iterations": 4, "steps_per_generation": 4}),
    Config("hints", {"hint_weight": 0.1, "hint_teacher": "base"}),
)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_nothing_differs_only_where_nothing_does(config: Config) -> None:
    """Read for TRL and written for it again: what is named is all that bears on the loss beyond that."""
    read = resolve("trl", USUAL | config.changes)
    found = [*map(str, read.findings)]
    if read.objective is not None:
        found += map(str, migrate(read.objective, "trl").differences)
    assert bool(found) == bool(config.named), found
    assert all(any(word in one for one in found) for word in config.named), found
