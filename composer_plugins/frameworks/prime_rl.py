"""PRIME-RL: its releases, its losses with their options, and the other options that bear on the loss.

PRIME-RL has no options for every loss: each `type` in [trainer.loss] has its own, with its own defaults.
"""

from composer_plugins.frameworks.contract import Framework, NamedLoss, Option, Sets

# --- Releases ------------------------------------------------------------------------------------------

OLDEST, NEWEST_TESTED, COMMIT = "0.8.0", "0.8.1.dev67", "559b447"  # the commit is the newest that was tested
NODES_SINCE = "0.8.1.dev52"  # which sends the stamps of verifiers' nodes to the loss
GLOBAL_TOKENS = "the tokens of the global batch"  # what the trainer divides the sum of a loss by
MODE = "token-mean"  # which that is

# --- Its losses ----------------------------------------------------------------------------------------


def _option(key: str, default: float, *parameters: str) -> Option:
    """An option that sets the parameter of its own name, or, a bound, these."""
    return Option(key=key, default=default, sets=(Sets(parameters or (key,)),))


_TAUS = _option("adv_tau", 1.0), _option("kl_tau", 1e-3)
DEFAULT_POLICY = "dppo_tv@prime-rl"  # of our loss, as of PRIME-RL
LOSSES = (
    NamedLoss(
        DEFAULT_POLICY,
        {"type": "default"},
        (_option("dppo_mask_low", 0.2, "tv_low"), _option("dppo_mask_high", 0.2, "tv_high"), *_TAUS),
    ),
    NamedLoss("ipo@prime-rl", {"type": "ipo"}, (_option("ipo_threshold", 0.1, "tv_low", "tv_high"), *_TAUS)),
)

# --- Our options ---------------------------------------------------------------------------------------

LOSS_OPTIONS = {"type", "import_path", "kwargs"}  # of [trainer.loss] with type "custom"
_BY_ALGORITHM = "PRIME-RL's algorithm computes the advantages", "set [orchestrator.algo], and remove it"
_BY_TEACHER = "the teacher is whatever computed the reference log-probabilities", "remove it"
_ONE_TOKEN = "PRIME-RL provides the log-probability of the sampled token only", "remove it"
_PAIRS = (
    "the trainer computes no preference loss: the environment writes DPO's gradient on the tokens of each "
    "pair, with stamps.stamp_replay_pair"
)
# Our options that the loss does not decide here: why not, and what to do.
UNAVAILABLE = {
    "advantage": _BY_ALGORITHM,
    "advantage_params": _BY_ALGORITHM,
    "on_bad_reward": (
        "PRIME-RL's algorithm computes the advantages from the rewards",
        "remove it, and let the environment return finite rewards",
    ),
    "hint_teacher": _BY_TEACHER,
    "hint_ema_rate": _BY_TEACHER,
    "hint_top_k": _ONE_TOKEN,
    "hint_t_start": _ONE_TOKEN,
    "teacher_prompt_template": _BY_TEACHER,
    "replay_loss": (_PAIRS, "remove it; for another loss than DPO see docs/prime_rl.md, Hints and pairs"),
    "replay_temperature": (_PAIRS, "remove it; for another one see docs/prime_rl.md, Hints and pairs"),
    "replay_params": (_PAIRS, "remove it, and give beta to stamps.stamp_replay_pair"),
}

CLONE = (
    "git clone https://github.com/PrimeIntellect-ai/prime-rl, add --source prime-rl, and pip install "
    "transformers pydantic-settings prime-pydantic-config tomli tomli-w loguru msgspec"
)

PRIME_RL = Framework(
    name="prime-rl",
    title="PRIME-RL",
    path="composer_plugins.adapters.prime_rl_plugin:loss_fn",
    summary="a loss_fn for trainer.loss.import_path: any policy loss, sampled-token hints, replay pairs",
    losses=LOSSES,
    options=tuple({option.key: option for one in LOSSES for option in one.own}.values()),
    provides={
        # old_logprobs with `old_policy`: the rollout engine's or the policy's own
        "policy": frozenset(
            {"logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs", "advantages"}
            | {"mask"}
        ),
        "divergence": frozenset({"student_logprobs", "teacher_logprobs", "mask"}),
        "correction": frozenset({"old_logprobs", "rollout_logprobs", "mask"}),
    },
    partial_batch=dict.fromkeys(
        ("policy", "divergence", "correction"), "PRIME-RL calls a loss with one sequence at a time"
    ),
    unavailable=UNAVAILABLE,
    marks=("orchestrator",),
    install=CLONE,
    command_line="flags",
    config_flag="@",
    suffixes=(".toml",),
    convention="composer_plugins.adapters.prime_rl_plugin.convention:PRIME_RL",
    claims="composer_plugins.conformance.prime_rl_claims.suite",
    doctor="composer_plugins.adapters.prime_rl_plugin.doctor",
    migration="composer_plugins.adapters.prime_rl_plugin.migration",
)
