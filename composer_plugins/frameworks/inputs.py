"""When a framework has an input of a policy loss, and what to do in a framework that never has it.

Which inputs a framework has at all is `Framework.provides`. `explain`, the errors of `Framework.require` and
the table of docs/writing_a_loss.md read both.
"""

from collections.abc import Mapping

from composer_plugins.losses.row import Loss

STAMPED = "at the tokens with a reference (`stamp_reference`); a loss that needs it trains no other token"
# By framework and input: when it is there, or whose log-probabilities it has.
WHEN: Mapping[str, Mapping[str, str]] = {
    "trl": {
        "ref_logprobs": "the trainer loads the initial policy for it; with `beta` above 0 it is TRL's own "
        "reference, whose KL TRL adds too",
        "rollout_logprobs": "vLLM's with `use_vllm`; otherwise the same as `old_logprobs`",
    },
    "verl": {
        "ref_logprobs": "with `trainer_mode: composer_sync` and `actor.use_kl_loss: True`, where "
        "`kl_loss_coef: 0` leaves verl's own KL out",
        "rollout_logprobs": "the rollout engine's with `trainer_mode: composer_sync` and "
        "`rollout.calculate_log_probs: True`, or with `bypass_mode`; otherwise the same as `old_logprobs`",
    },
    "prime-rl": {
        "old_logprobs": 'with `old_policy = "rollout"`: the rollout engine\'s log-probabilities',
        "ref_logprobs": STAMPED,
        "teacher_logprobs": STAMPED,
    },
    "tinker": {
        "ref_logprobs": "after `add_ref_logprobs`",
        "teacher_logprobs": "after `add_teacher_logprobs`",
    },
    "nemo-rl": {
        "ref_logprobs": "unless `grpo.skip_reference_policy_logprobs_calculation` is set; "
        "`reference_policy_kl_penalty: 0` leaves NeMo-RL's own KL out",
    },
    "slime": {
        "ref_logprobs": "with `--ref-load`, and `--use-kl-loss` or `--kl-coef`; `--kl-loss-coef 0` leaves "
        "slime's own KL out",
        "teacher_logprobs": "with `--use-opd` and `--opd-type`",
    },
}
# By framework and input that it never has: what does the work of a loss with it.
INSTEAD: Mapping[str, Mapping[str, str]] = {
    "skyrl": {"ref_logprobs": "leave the KL out of the loss, and set trainer.algorithm.use_kl_loss=true"},
}


def conditions(framework: str, loss: Loss) -> dict[str, str]:
    """By input of a loss, when this framework has it, where that is not always."""
    when = WHEN.get(framework, {}) if loss.kind == "policy" else {}
    return {name: when[name] for name in (*loss.needs, *loss.optional) if name in when}
