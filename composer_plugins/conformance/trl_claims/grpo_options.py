"""The options of GRPOConfig that concern its loss, and random mixtures of them."""

from types import SimpleNamespace
from typing import Any

from composer_plugins.frameworks.trl import LOSS_OPTIONS
from composer_plugins.testing.draws import Draw

# The values that a mixture of options draws from: values that set a parameter of our loss, and the others.
PARAMETERS: dict[str, tuple[Any, ...]] = {
    "epsilon_low": (0.01, 0.1, 0.7),  # the trainer splits the config's epsilon in two
    "epsilon_high": (0.02, 0.2, 1.3, 5.0),
    "delta": (None, 1.5, 4.0),
    "sapo_temperature_pos": (1.0, 0.7),
    "sapo_temperature_neg": (1.05, 0.3),
    "vespo_k_pos": (2.0, 0.7),
    "vespo_lambda_pos": (3.0, 1.1),
    "vespo_k_neg": (3.0, 1.5),
    "vespo_lambda_neg": (2.0, 0.3),
}
DRAWN: dict[str, tuple[Any, ...]] = {
    "beta": (0.0, 0.1, 0.9),
    "use_bias_correction_kl": (False, True),
    "off_policy_mask_threshold": (None, 0.0, 0.3),
    "top_entropy_quantile": (1.0, 0.75, 0.2),
    "entropy_coef": (0.0, 0.3),
    "use_vllm": (False, True),
    "training": (False, True),
    "processes": (1, 2),
    "current_gradient_accumulation_steps": (1, 3),
    "steps_per_generation": (1, 2),
}
DEFAULTS = {
    **{key: LOSS_OPTIONS[key].default for key in (*PARAMETERS, *DRAWN) if key in LOSS_OPTIONS},
    **dict.fromkeys(("epsilon_low", "epsilon_high"), LOSS_OPTIONS["epsilon"].default),
    **{"loss_type": "grpo", "importance_sampling_level": "token", "max_completion_length": 7},
    **{"training": True, "processes": 1, "current_gradient_accumulation_steps": 1, "steps_per_generation": 1},
}


class Options(SimpleNamespace):
    """What a GRPOConfig says of the loss, by its names and with its defaults, and how the batch is cut."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**DEFAULTS | given)

    def replace(self, **given: Any) -> "Options":
        """These options with others in their place."""
        return Options(**vars(self) | given)

    @property
    def steps(self) -> float:
        """By how much TRL divides: evaluation does not accumulate."""
        return float(self.current_gradient_accumulation_steps) if self.training else 1.0

    def of_its_loss(self) -> dict[str, Any]:
        """What sets parameters of our loss, by the table's names; nothing where TRL is at its defaults."""
        given = {key: getattr(self, key) for key in PARAMETERS}
        is_default = all(value == DEFAULTS[key] for key, value in given.items())
        return {} if is_default else given | {"epsilon": self.epsilon_low}


def draw_options(draw: Draw) -> Options:
    """Any mixture of TRL's options; an eighth has the defaults of its loss: the dialect here."""
    drawn = {key: draw.choose([*values], key) for key, values in (PARAMETERS | DRAWN).items()}
    if draw.integer(0, 7, "defaults of the loss") == 0:
        drawn = {key: value for key, value in drawn.items() if key not in PARAMETERS}
    return Options(**drawn)
