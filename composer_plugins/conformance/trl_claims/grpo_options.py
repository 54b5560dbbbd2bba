"""The options of GRPOConfig that concern its loss, and random mixtures of them."""

from dataclasses import dataclass, field, fields
from typing import Any

from composer_plugins.testing.draws import Draw


def drawn(default: Any, *others: Any) -> Any:
    """An option with its default, and the values that a mixture of options draws from."""
    return field(default=default, metadata={"drawn": others})


@dataclass(frozen=True)
class Options:
    """What a GRPOConfig says of the loss, by its names, and how the batch is cut."""

    loss_type: str = "grpo"
    importance_sampling_level: str = "token"
    max_completion_length: int = 7
    epsilon_low: float = drawn(0.2, 0.01, 0.1, 0.7)
    epsilon_high: float = drawn(0.2, 0.02, 0.2, 1.3, 5.0)
    delta: float | None = drawn(None, None, 1.5, 4.0)
    sapo_temperature_pos: float = drawn(1.0, 1.0, 0.7)
    sapo_temperature_neg: float = drawn(1.05, 1.05, 0.3)
    vespo_k_pos: float = drawn(2.0, 2.0, 0.7)
    vespo_lambda_pos: float = drawn(3.0, 3.0, 1.1)
    vespo_k_neg: float = drawn(3.0, 3.0, 1.5)
    vespo_lambda_neg: float = drawn(2.0, 2.0, 0.3)
    beta: float = drawn(0.0, 0.0, 0.1, 0.9)
    use_bias_correction_kl: bool = drawn(False, False, True)
    off_policy_mask_threshold: float | None = drawn(None, None, 0.0, 0.3)
    top_entropy_quantile: float = drawn(1.0, 1.0, 0.75, 0.2)
    entropy_coef: float = drawn(0.0, 0.0, 0.3)
    use_vllm: bool = drawn(False, False, True)
    training: bool = drawn(True, False, True)
    processes: int = drawn(1, 1, 2)
    current_gradient_accumulation_steps: int = drawn(1, 1, 3)
    steps_per_generation: int = drawn(1, 1, 2)

    @property
    def steps(self) -> float:
        """By how much TRL divides: in evaluation there is no accumulation."""
        return float(self.current_gradient_accumulation_steps) if self.training else 1.0


def draw_options(draw: Draw) -> Options:
    """Any mixture of TRL's options."""
    options = [one for one in fields(Options) if "drawn" in one.metadata]
    return Options(**{one.name: draw.choose([*one.metadata["drawn"]], one.name) for one in options})
