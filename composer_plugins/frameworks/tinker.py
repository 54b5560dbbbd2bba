"""Tinker's call, which Fireworks, Together, TuFT and SkyRL's server share, and what the cookbook names.

Read in tinker 0.38.0 (`tinker/lib/public_interfaces/training_client.py`, `custom_loss.py`) and in
tinker-cookbook 0.6.1. A loss function gets every datum and log-probability of one `forward_backward_custom`,
and Tinker adds up the gradients of all calls before an `optim_step`. Its own losses run on its servers, and
cannot be compared.
"""

from composer_plugins.frameworks.clips import BY_RATIO
from composer_plugins.frameworks.contract import MINUS_ONE, ONE_MINUS, Framework, NamedLoss, Sets

# By input of a loss, the entry of a datum's `loss_fn_inputs` that has it. The first three are the cookbook's.
OWN_ENTRIES = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "hint_mask", "pair", "pair_weight")
ENTRIES = {"rollout_logprobs": "logprobs", "advantages": "advantages", "mask": "mask"}
ENTRIES |= {name: name for name in OWN_ENTRIES}

_BY_PROGRAM = (
    "a Tinker program computes the advantages itself",
    "remove it, and call composer_plugins.adapters.tinker_loss.add_advantages",
)
_BY_TEACHER = (
    "a Tinker program asks its teacher itself",
    "remove it, and call composer_plugins.adapters.tinker_loss.add_teacher_logprobs",
)
_ONE_TOKEN = (
    "a Tinker loss function gets the log-probability of the sampled token alone",
    "remove it: hint_divergence is 'sampled_token'",
)
UNAVAILABLE = {
    **dict.fromkeys(("advantage", "advantage_params", "on_bad_reward"), _BY_PROGRAM),
    **dict.fromkeys(("hint_teacher", "hint_ema_rate", "teacher_prompt_template"), _BY_TEACHER),
    **dict.fromkeys(("hint_top_k", "hint_t_start"), _ONE_TOKEN),
    "replay_temperature": ("Tinker's log-probabilities are those at temperature 1", "remove it"),
}

TINKER = Framework(
    name="tinker",
    title="Tinker and its cookbook",
    release="0.38.0",
    path="composer_plugins.adapters.tinker_loss:loss_fn",
    summary="a function for forward_backward_custom: any policy loss, sampled-token hints, preference pairs",
    package="tinker",
    install="pip install tinker",
    without_config="set the options in loss_fn, which checks them when it is called: docs/tinker.md",
    losses=(
        NamedLoss("importance_sampling@tinker", {"loss_fn": "importance_sampling"}),
        NamedLoss("ppo@tinker", {"loss_fn": "ppo"}),
    ),
    denominators={"": "token-sum"},
    provides={
        "advantage": frozenset({"rewards", "group_ids", "lengths"}),
        "policy": frozenset(
            {"logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs", "advantages"}
            | {"mask"}
        ),
        "divergence": frozenset({"student_logprobs", "teacher_logprobs", "mask"}),
        "preference": frozenset({"chosen", "rejected", "ref_chosen", "ref_rejected", "chosen_nll"}),
        "correction": frozenset({"old_logprobs", "rollout_logprobs", "mask"}),
    },
    unavailable=UNAVAILABLE,
    partial_batch=dict.fromkeys(
        ("policy", "divergence", "preference", "correction"),
        "a step of Tinker may be cut into several calls",
    ),
    names={
        "clip_low_threshold": (Sets(("clip_low",), BY_RATIO, ONE_MINUS),),
        "clip_high_threshold": (Sets(("clip_high",), BY_RATIO, MINUS_ONE),),
        "kl_penalty_coef": (Sets(("kl_coef",), ("opd",)),),
    },
    convention="composer_plugins.testing.conventions.sums:TINKER",
)
