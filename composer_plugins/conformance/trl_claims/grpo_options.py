"""The options of GRPOConfig that concern its loss, and random mixtures of them."""

from dataclasses import dataclass
from typing import Any

from composer_plugins.testing.draws import Draw


@dataclass(frozen=True)
class Options:
    """What a GRPOConfig says of the loss, by its names, and how the batch is cut."""

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    beta: float = 0.0
    use_bias_correction_kl: bool = False
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_vllm: bool = False
    training: bool = True
    processes: int = 1
    current_gradient_accumulation_steps: int = 1
    steps_per_generation: int = 1

    @property
    def steps(self) -> float:
        """By how much TRL divides: in evaluation there is no accumulation."""
        return float(self.current_gradient_accumulation_steps) if self.training else 1.0


DRAWN: dict[str, list[Any]] = {
    "epsilon_low": [0.01, 0.1, 0.7],
    "epsilon_high": [0.02, 0.2, 1.3, 5.0],
    "delta": [None, 1.5, 4.0],
    "sapo_temperature_pos": [1.0, 0.7],
    "sapo_temperature_neg": [1.05, 0.3],
    "vespo_k_pos": [2.0, 0.7],
    "vespo_lambda_pos": [3.0, 1.1],
    "vespo_k_neg": [3.0, 1.5],
    "vespo_lambda_neg": [2.0, 0.3],
    "beta": [0.0, 0.1, 0.9],
    "use_bias_correction_kl": [False, True],
    "off_policy_mask_threshold": [None, 0.0, 0.3],
    "top_entropy_quantile": [1.0, 0.75, 0.2],
    "entropy_coef": [0.0, 0.3],
    "use_vllm": [False, True],
    "training": [False, True],
    "processes": [1, 2],
    "current_gradient_accumulation_steps": [1, 3],
    "steps_per_generation": [1, 2],
}


def draw_options(draw: Draw) -> Options:
    """Any mixture of TRL's options."""
    return Options(**{name: draw.choose(values, name) for name, values in DRAWN.items()})
