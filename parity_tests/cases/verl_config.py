"""Configs of verl by their dotted keys, with a mistake or sound, and what the doctor finds without verl.

`verl.py` makes the mistakes with verl itself, and records what is said. `judged` needs no verl: it judges
the options that our rules look at, in an environment in which all is well unless a test says otherwise.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from composer_plugins.adapters.verl_plugin import doctor
from composer_plugins.adapters.verl_plugin.options import TARGET, TRAINER
from composer_plugins.adapters.verl_plugin.sync_trainer.checks import Run, findings
from composer_plugins.adapters.verl_plugin.upstream import release_of
from composer_plugins.errors import Finding

Changes = dict[str, Any]  # by dotted keys

ACTOR, NODE, CORRECTION = "actor_rollout_ref.actor", "algorithm.composer", "algorithm.rollout_correction"
ESTIMATOR, LOSS, MODE = "algorithm.adv_estimator", f"{ACTOR}.policy_loss", "trainer.v1.trainer_mode"
LOSS_MODE, AGG, BYPASS = f"{LOSS}.loss_mode", f"{ACTOR}.loss_agg_mode", f"{CORRECTION}.bypass_mode"
ROLLOUT, GROUP_SIZE = "actor_rollout_ref.rollout.calculate_log_probs", "actor_rollout_ref.rollout.n"
FUSED, V1 = "actor_rollout_ref.model.use_fused_kernels", "trainer.use_v1"

DEFAULTS: Changes = {  # verl 0.9.1's, as far as they are looked at
    ESTIMATOR: "gae",
    "algorithm.use_kl_in_reward": False,
    BYPASS: False,
    f"{LOSS}._target_": "verl.workers.config.PolicyLossConfig",
    LOSS_MODE: "vanilla",
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.shuffle": False,
    AGG: "token-mean",
    FUSED: False,
    ROLLOUT: True,
    "trainer.project_name": "verl_examples",
    V1: True,
    MODE: "sync",
    "distillation.enabled": False,
}

# What the probe answers, of an environment in which all is well.
VERL = {"version": "0.9.1", "error": "", "absent": False, "failure": ""}
OUR_LOSSES = [f"composer/{name}" for name in ("cispo", "dapo", "dppo_tv", "grpo", "reinforce")]
FACTS: dict[str, Any] = {
    "package": "",
    "verl": VERL,
    "composition": "",
    "estimators": ["composer", "composer/reinforce_pp_baseline", "composer/rloo", "gae", "grpo", "rloo"],
    "losses": ["composer", *OUR_LOSSES, "geo_mean", "vanilla"],
}


def tree(changes: Mapping[str, Any]) -> dict[str, Any]:
    """verl's config with these changes."""
    return changed({}, {**DEFAULTS, **changes})


def changed(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config, after these changes in place."""
    for path, value in changes.items():
        *above, last = path.split(".")
        holder = config
        for key in above:
            holder = holder.setdefault(key, {})
        holder[last] = deepcopy(value)
    return config


def answered(config: dict[str, Any] | None, **others: Any) -> dict[str, Any]:
    """What the probe answers, with these other answers."""
    facts = {**FACTS, "config": config, **others}
    return facts | {"findings": findings(Run(config), facts) if config else []}


def judged(config: dict[str, Any] | None, **others: Any) -> list[Finding]:
    """What the doctor finds in what the probe answers."""
    facts = answered(config, **others)
    release_of(facts["verl"]["version"])
    return list(doctor.judge(facts, "python"))


def options_of(table: str) -> Callable[..., Changes]:
    """A function that returns its keywords as options of the table."""
    return lambda **options: {f"{table}.{name}": value for name, value in options.items()}


actor, loss, algorithm, node, correction = map(options_of, (ACTOR, LOSS, "algorithm", NODE, CORRECTION))


def workers(**options: Any) -> Changes:
    """Our policy loss, and these options in the workers' table."""
    return WORKERS | {f"{LOSS}.composer": options}


def both(**options: Any) -> Changes:
    """Our policy loss, and these options in the driver's table and in the workers'."""
    return WORKERS | node(**options) | {f"{LOSS}.composer": options}


OURS: Changes = {ESTIMATOR: "composer"}
GRPO: Changes = {ESTIMATOR: "grpo"}
WORKERS: Changes = {LOSS_MODE: "composer", f"{LOSS}._target_": TARGET}
SYNC = OURS | {MODE: TRAINER}
FROZEN = actor(use_kl_loss=True)
HINT = SYNC | FROZEN | node(hint_weight=0.1, hint_top_k=20)  # compares distributions
SAMPLED = SYNC | FROZEN | node(hint_weight=0.1, hint_divergence="sampled_token")
LIVE = SYNC | node(hint_weight=0.1, hint_divergence="sampled_token", hint_teacher="live")
TOP_K = LIVE | node(hint_divergence="jsd", hint_top_k=8)
TAID = TOP_K | node(hint_divergence="taid", hint_params={"t": 1.0}, hint_t_start=0.4)
REPLAY = SYNC | FROZEN | node(replay_weight=1)
NO_REFERENCE = actor(use_kl_loss=False)
PAPERS: Changes = {AGG: "seq-mean-token-mean"}  # GRPO's
COMPOSER = {LOSS_MODE: "composer"} | PAPERS
CISPO, DAPO, DPPO, GEO_MEAN = (
    {LOSS_MODE: name} for name in ("composer/cispo", "composer/dapo", "composer/dppo_tv", "geo_mean")
)
BYPASSED = SYNC | FROZEN | {BYPASS: True}
LEGACY: Changes = {V1: False}


def scaled(adv_tau: float, hint_estimator: str = "advantage") -> dict[str, Any]:
    """Options of a policy loss that scales its advantages, and of a hint that may be in them."""
    hint = {"hint_weight": 0.1, "hint_divergence": "sampled_token", "hint_estimator": hint_estimator}
    return hint | {"policy_params": {"adv_tau": adv_tau}}


def of_entropies(logprobs: Any, entropies: Any, mask: Any) -> Any:
    """A loss that asks for an input that verl does not provide."""


def of_gold_nll(chosen: Any, rejected: Any, gold_nll: Any) -> Any:
    """A preference loss that asks for an input that verl does not provide."""


def of_logits(student_logits: Any, teacher_logits: Any, mask: Any, *, sharpness: float = 1.0) -> Any:
    """A divergence that verl can run."""


def of_rollouts(logprobs: Any, rollout_logprobs: Any, advantages: Any, mask: Any, *, sharpness: float) -> Any:
    """A policy loss that verl can run."""
    from composer_plugins.kernels.types import TokenLoss

    return TokenLoss(-logprobs * advantages, {})


OF_ENTROPIES, OF_GOLD_NLL = f"{__name__}:of_entropies", f"{__name__}:of_gold_nll"
OF_LOGITS, OF_ROLLOUTS = f"{__name__}:of_logits", f"{__name__}:of_rollouts"

MISTAKES: dict[str, Changes] = {
    "an unknown estimator": {ESTIMATOR: "composer/rlo"},
    "an unknown loss": {LOSS_MODE: "composer/cipso"},
    "one rollout of each prompt": OURS | {GROUP_SIZE: 1},
    "a reduction that gmpo@verl does not have": OURS | both(policy="gmpo@verl") | {AGG: "token-sum"},
    "a hint in the advantages that verl's own loss averages": (
        SAMPLED | node(hint_estimator="advantage") | GEO_MEAN
    ),
    "an advantage that only the workers see": OURS | workers(advantage="rloo", policy="cispo"),
    "a hint that only the workers see": SYNC | workers(policy="cispo", hint_weight=0.5),
    "a policy in the workers beside verl's loss": (
        OURS | loss(_target_=TARGET, composer={"policy": "cispo"})
    ),
    "an unknown option": OURS | node(hint_wieght=0.1),
    "an option of the wrong type": OURS | node(hint_weight="0.1"),
    "an unknown advantage": OURS | node(advantage="grop"),
    "an advantage whose components verl does not pass": OURS | node(advantage="gdpo"),
    "a critic": OURS | {"critic.enable": True},
    "two advantages": {ESTIMATOR: "composer/rloo"} | node(advantage="grpo"),
    "verl's clip beside a loss without one": (
        OURS | {LOSS_MODE: "composer/reinforce"} | actor(clip_ratio_high=0.28)
    ),
    "verl's name of a parameter": OURS | PAPERS | both(policy_params={"clip_ratio_c": 3.0}),
    "a parameter among the options": OURS | PAPERS | both(clip_ratio_high=0.28),
    "a lambda of GAE": OURS | algorithm(lam=0.9),
    "what verl does itself": OURS | node(rollout_correction="tis"),
    "no table": OURS | {NODE: 3},
    "options that nothing reads": GRPO | node(advantage="rloo"),
    "nothing of ours": GRPO,
    "an advantage beside another estimator": GRPO | COMPOSER | node(advantage="rloo"),
    "a policy beside verl's loss": OURS | node(policy="cispo"),
    "the policy's weight beside verl's loss": REPLAY | node(policy_weight=0.0),
    "a policy that the workers do not see": OURS | COMPOSER | node(policy="cispo"),
    "another policy in the workers": SAMPLED | workers(policy="grpo") | PAPERS | node(policy="cispo"),
    "an unknown policy in the workers' node": OURS | workers(policy="cipso"),
    "a misspelt option in the workers' node": OURS | workers(polisy="grpo"),
    "a loss over the whole batch": OURS | workers(policy="clip_cov"),
    "an input that verl does not have": OURS | workers(policy=OF_ENTROPIES),
    "a reduction that is not the paper's": {LOSS_MODE: "composer/grpo"},
    "a hint in the advantages that adv_tau scales": BYPASSED | both(policy="ipo", **scaled(0.5)),
    "an adv_tau of 0 and a hint in the advantages": BYPASSED | both(policy="ipo", **scaled(0.0)),
    "a hint of a distribution without its size": LIVE | node(hint_divergence="jsd"),
    "a size of a hint of sampled tokens": LIVE | node(hint_top_k=4),
    "a rate of an average that verl does not keep": LIVE | node(hint_ema_rate=0.1),
    "a cap of a ratio that a hint in the advantages does not compute": (
        LIVE | node(hint_estimator="advantage", hint_params={"ratio_cap": 2.0})
    ),
    "more entries than the teacher sends": TOP_K | node(hint_params={"top_k": 10}),
    "a divergence whose temperature is TRL's": TOP_K | node(hint_divergence="jsd@trl"),
    "a start of t without TAID": TOP_K | node(hint_t_start=0.1),
    "a start of t above its end": TAID | node(hint_params={"t": 0.2}),
    "a start of t above 1": TAID | node(hint_t_start=1.5),
    "a preference loss of an input that verl does not have": (
        SYNC | node(replay_weight=1.0, replay_loss=OF_GOLD_NLL)
    ),
    "a preference loss that sorts the batch": SYNC | node(replay_weight=1.0, replay_loss="aot"),
    "verl's default clip beside a ratio of the sequence": OURS | both(policy="gspo_token@verl"),
    "a hint in another trainer": OURS | node(hint_weight=0.1),
    "a hint in the legacy trainer": HINT | LEGACY,
    "hint options without a weight": OURS | node(hint_teacher="live"),
    "replay options without a weight": SYNC | node(replay_loss="simpo"),
    "an averaged teacher": HINT | node(hint_teacher="ema"),
    "a hint's reference": HINT | NO_REFERENCE,
    "logits of fused kernels": HINT | {FUSED: True},
    **{
        f"logits that {model}.strategy leaves out": HINT | {f"actor_rollout_ref.{model}.strategy": "megatron"}
        for model in ("actor", "ref")
    },
    "shuffled pairs": REPLAY | actor(shuffle=True),
    "a mean over replayed rows": REPLAY | GEO_MEAN,
    "a width that replayed rows change": REPLAY | {AGG: "seq-mean-token-sum-norm"},
    "two distillations": HINT | {"distillation.enabled": True},
    "DPPO around the trainer's policy": DPPO,
    "DPPO without the engine's log-probabilities": DPPO | {ROLLOUT: False},
}

SOUND: dict[str, Changes] = {
    "a named estimator": {ESTIMATOR: "composer/rloo"},
    "its parameters": OURS | node(advantage="rloo"),
    "a policy loss": CISPO | GRPO,
    "the same twice": CISPO | OURS | node(policy="cispo"),
    "verl's default clip and another one in the node": (
        OURS | both(policy="grpo@verl", policy_params={"clip_high": 0.3}) | actor(clip_ratio_high=0.2)
    ),
    "the legacy trainer": OURS | LEGACY,
    "a policy of the user's own": (
        OURS | both(policy=OF_ROLLOUTS, policy_params={"sharpness": 2}) | {BYPASS: True}
    ),
    "a policy's weight beside a hint": HINT | both(policy="cispo", policy_weight=0.5),
    "one rollout where no advantage is used": (
        HINT | both(policy="cispo", policy_weight=0.0, hint_weight=0.1, hint_top_k=20) | {GROUP_SIZE: 1}
    ),
    "a hint": HINT,
    "a hint of TAID": TAID,
    "a hint of the user's own": TOP_K | node(hint_divergence=OF_LOGITS, hint_params={"sharpness": 2.0}),
    "a hint of sampled tokens with fused kernels": SAMPLED | {FUSED: True},
    "a live hint": HINT | NO_REFERENCE | node(hint_teacher="live"),
    "a reference by the reward": HINT | NO_REFERENCE | algorithm(use_kl_in_reward=True),
    "replay": REPLAY,
    "replay without a reference": REPLAY | NO_REFERENCE | node(replay_loss="simpo"),
    "a trainer of ours with nothing on": SYNC,
    "a bypass in the legacy trainer": DPPO | {BYPASS: True} | LEGACY,
    "a trained adapter without a reference": OURS | {"actor_rollout_ref.model.lora_adapter_path": "adapter"},
    "a cut distribution without a ratio to it": OURS | {"actor_rollout_ref.rollout.top_p": 0.9},
    "weights of 0": OURS | node(hint_weight=0, replay_weight=0.0),
    "DPPO around the engine's policy": DPPO | {BYPASS: True},
    "verl's own reduction of geo_mean": OURS | both(policy="gmpo@verl"),
    "one rollout and an advantage without groups": OURS | node(advantage="reinforce_pp") | {GROUP_SIZE: 1},
    "options of the KL, the correction and the reduction that act": (
        OURS
        | FROZEN
        | actor(kl_loss_coef=0.01, kl_loss_type="mse")
        | algorithm(use_kl_in_reward=True, kl_penalty="low_var_kl")
        | {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.horizon": 100}
        | correction(rollout_is="token", rollout_is_threshold=5.0)
        | actor(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=1024)
    ),
    "the advantage of the paper, as verl has it": (
        workers(policy="dr_grpo")
        | GRPO
        | algorithm(norm_adv_by_std_in_grpo=False)
        | {AGG: "seq-mean-token-sum-norm"}
        | actor(loss_scale_factor=1024)
    ),
    "a loss of sequences beside equal advantages": (
        OURS | both(policy="gspo", advantage="reinforce_pp") | PAPERS
    ),
    "a hint in the advantages that adv_tau leaves alone": BYPASSED | both(policy="ipo", **scaled(1.0)),
    "adv_tau beside a hint that is not in the advantages": BYPASSED
    | both(policy="ipo", **scaled(0.5, "score")),
}
