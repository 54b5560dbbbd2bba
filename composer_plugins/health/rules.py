"""What a run is warned of: each rule with its limit, and where the limit comes from.

A rule looks at a `Window`: the sums of at least 16 rows and 256 tokens, of a step, or of an update of the
weights. "equal" are windows in which trainer and sampler have the same weights, as before the first update
after each generation: only there is a limit absolute. "whole" are all of these windows added up. In "later"
windows the policy has moved, so growth and a clip without effect alone are judged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from composer_plugins.health.measuring import LARGEST, Window

# At equal weights bfloat16 leaves k3 at 6e-5 to 1.6e-3, and a faulty sampler at 4e-3 and more with a mean
# log-ratio of 0.09. These two limits found 13 of 13 such faults on two models, without a false alarm.
K3, KL = 0.01, 0.03
SHIFTED = 0.1  # effective sample size: log-probabilities of the next token leave 0.004 to 0.05
TEMPERED = 0.25  # of the log-ratio's variance: temperatures of 0.5 to 1.3 leave 0.63, old weights 0.03
UNRELATED = 0.5  # correlation of the two log-probabilities
IDLE = 0.05  # nats per token of KL(sampler | trainer) at which a clip acts (arXiv 2610.02911)
NOISE = 0.05  # of the tokens, and three standard errors over rows: sound runs clip 0 to 3 % at equal weights
Z, SURPRISE = 4.0, 0.05  # standard errors, and nats per token; sound runs stay within 1.5 standard errors

When = Literal["equal", "whole", "later", "always", "first", "rollouts", "weights", "pairs"]


@dataclass(frozen=True)
class Rule:
    """A warning: under which metric it stands, when it holds, and what it says."""

    metric: str
    when: When
    holds: Callable[[Window], bool]
    problem: str  # with numbers of the window: `Numbers`
    remedy: str
    windows: int = 1  # in a row, in which it has to hold
    size: str = ""  # the warning comes again where this number is ten times larger
    unless: str = ""  # metrics of other rules that explain it
    by_update: bool = False  # whether windows of one update of the weights count as one
    since_start: bool = False  # whether it has to hold from the first window on

    def described(self, window: Window) -> str:
        """The problem with the numbers of this window."""
        return self.problem.format_map(Numbers(window, self.windows))


@dataclass(frozen=True)
class Numbers:
    """Numbers of a window by what a text calls them: "mean kl", "% clipped", "z surprise", "rows"."""

    window: Window
    windows: int

    def __getitem__(self, name: str) -> Any:
        kind, _, rest = name.partition(" ")
        of, _, over = rest.partition(" over ")
        if kind in ("mean", "%"):
            mean = self.window.mean(of, over or "tokens")
            return mean if kind == "mean" else f"{100 * mean:.3g} %"
        if kind == "z":
            return self.window.z(of)
        known = {"windows": self.windows, "baseline": self.window.baseline}
        return known[name] if name in known else self.window[name]


def disagrees(w: Window) -> bool:
    """Whether trainer and sampler give the same tokens different probabilities."""
    return "kl" in w and w["tokens"] >= 64 and (w.mean("k3") > K3 or abs(w.mean("kl")) > KL)


SAMPLERS = "not_sampled_frac ess ratio_mean k3_kl"
SAME_SAMPLER = (
    "sample at temperature 1 without top_p, top_k, min_p and penalties, or let the engine return the "
)
SAME_SAMPLER += "log-probabilities of the distribution that it samples from, and scale the trainer's alike"


def _sampler(metric: str, cause: str, remedy: str, holds: Callable[[Window], bool]) -> Rule:
    problem = (
        "trainer and sampler have equal weights and give the sampled tokens different probabilities (KL "
    )
    problem += "{mean kl:.3g}, k3 {mean k3:.3g}, mean ratio {mean ratio:.3g}): " + cause
    size = "mean k3"
    return Rule(metric, "equal", lambda w: disagrees(w) and holds(w), problem, remedy, 1, size, SAMPLERS)


# fmt: off
RULES = (
    Rule("not_sampled_frac", "always", lambda w: w.mean("not sampled") > 0.002 and w.mean("sampled") < -0.1,
         "{% not sampled} of the unmasked tokens have the log-probability 0 from the sampler, and less than "
         "-1 from the trainer, so nobody sampled them",
         "look for a mask that begins one token early or that includes the prompt, padding or tool results",
         size="mean not sampled"),
    _sampler("k3_kl", "they agreed before, as where the sampler no longer gets the trainer's weights",
             "look at how and when weights are sent to the sampler", lambda w: w["agreed before"] > 0),
    _sampler("ess", "they are hardly related, as where they belong to the next token or to another row",
             "compare the log-probabilities of one row by hand, token by token",
             lambda w: w.effective_sample_size < SHIFTED or w.correlation < UNRELATED),
    _sampler("ratio_mean",
             "no token is less likely for the sampler, so it cuts its distribution (top_p, top_k, greedy)",
             "set top_p=1, top_k=-1 (0 in transformers) and min_p=0, or every ratio to the sampler is biased",
             lambda w: w.mean("ratio above 1") < 0.01 and w.mean("kl") > 0),
    _sampler("k3_kl", "the log-ratio changes with the log-probability, so the temperatures differ",
             "give trainer and sampler the same temperature", lambda w: w.by_temperature > TEMPERED),
    _sampler("k3_kl", "no cut and no temperature explains it",
             "look for old weights in the sampler, and for its precision and kernels; " + SAME_SAMPLER,
             lambda w: True),
    Rule("clip_frac", "whole",
         lambda w: w["tokens"] >= 64 and w.mean("clipped") > NOISE + 3 * (NOISE / w["rows"]) ** 0.5,
         "{% clipped} of the tokens are clipped or masked out before the policy has moved: rounding alone "
         "puts their ratios outside the range",
         "compute log-probabilities in float32, or widen the clip: bfloat16 moves a sequence by 1e-3",
         size="mean clipped", unless=SAMPLERS),
    Rule("surprise", "whole",
         lambda w: w["rows"] >= 16 and w.z("surprise") < -Z and w.mean("surprise") < -SURPRISE,
         "the tokens are more likely than tokens of this policy are on average ({mean surprise:.3g} nats per "
         "token, {z surprise:.1f} standard errors), so they come from a narrower distribution", SAME_SAMPLER,
         unless=SAMPLERS),
    Rule("surprise", "whole",
         lambda w: w["rows"] >= 16 and w.z("surprise") > Z and w.mean("surprise") > SURPRISE,
         "the tokens are less likely than tokens of this policy are on average ({mean surprise:.3g} nats per "
         "token, {z surprise:.1f} standard errors), so some were not sampled from it",
         "look for padding, prompt or tool tokens in the mask, for a temperature above the trainer's, for "
         "dropout, and for old weights in the sampler", size="mean surprise", unless=SAMPLERS),
    Rule("k3_kl", "later", lambda w: w.mean("k3") > max(0.1, 10 * w.baseline),
         "k3 between trainer and sampler has grown from {baseline:.2g} to {mean k3:.3g}",
         "send weights to the sampler more often, lower learning_rate, or add a rollout correction",
         windows=3, size="mean k3"),
    Rule("clip_frac", "later", lambda w: "clipped" in w and w["clipped"] == 0 and w.mean("kl") > IDLE,
         "the clip cuts nothing, while the KL to the sampler is {mean kl:.3g} nats per token",
         "choose a loss whose ratio is to the policy that sampled (old_policy, dppo_tv), or a narrower clip",
         windows=8, unless=SAMPLERS),
    Rule("clip_frac", "later", lambda w: w.mean("clipped") > 0.5,
         "{% clipped} of the tokens are clipped or masked out, for {windows} windows in a row",
         "make fewer updates per generation, lower learning_rate, or widen the clip", windows=8),
    Rule("ratio_moved_frac", "always",
         lambda w: w["clip set"] > 0 and "moved" in w and w["moved"] == 0 and w["tokens"] > 0,
         "the ratio to the old policy is 1 at every token, so the clip that is set cuts nothing",
         "make several updates per generation (num_iterations, ppo_epochs), or remove the clip; if there are "
         "several, look at the learning rate", windows=8, by_update=True),
    Rule("zero_adv_token_frac", "always", lambda w: w.mean("holes") > 0.01,
         "{% holes} of the unmasked tokens have advantage 0 in rows whose other tokens all have one "
         "advantage: they train nothing and count in the denominator",
         "mask these tokens out, unless each turn of a row has an advantage of its own"),
    Rule("zero_adv_frac", "always", lambda w: "silent" in w and w["silent"] == w["tokens"] > 0,
         "every advantage of the last {windows} windows is 0 ({rows:.0f} rows in this one)",
         "look at the rewards: the rewards of a group are equal, or each rollout is a group of its own",
         windows=8, unless="group_of_one_frac equal_group_frac"),
    Rule("advantage_max", "always", lambda w: w[f"{LARGEST}advantage"] > 1e3,
         f"an advantage is {{{LARGEST}advantage:.3g}}, so a clip of the gradient leaves its direction alone",
         "divide the rewards, or scale the advantages by their standard deviation",
         size=f"{LARGEST}advantage"),
    Rule("empty_row_frac", "always", lambda w: w["empty rows"] > 0 == w["rows"],
         "none of {empty rows:.0f} rows has an unmasked token",
         "look at the mask, and at what leaves rollouts out (overlong filters, tool failures, in PRIME-RL "
         "a loss with ref_logprobs at tokens that no stamp_reference has marked)"),
    Rule("empty_row_frac", "always", lambda w: w["empty rows"] > w["rows"],
         "{empty rows:.0f} rows have no unmasked token, and {rows:.0f} have some",
         "look at the mask, and at what leaves rollouts out (overlong filters, tool failures)",
         windows=2, unless="empty_row_frac"),
    Rule("grad_top_frac", "always",
         lambda w: w["gradient tokens"] >= 64 and w[f"{LARGEST}gradient"] > 0.5 * w["gradient"],
         "one token of {gradient tokens:.0f} has more than half of the gradient",
         "bound the weight of a token: choose a clip on both sides (dual_clip, cispo), or cap the correction",
         windows=2),
    Rule("grad_top_frac", "always",
         lambda w: "gradient" in w and w["gradient"] == 0 and w["silent"] < w["tokens"],
         "no token has a gradient, and there are advantages that are not 0",
         "look at the clip: it may cut every token", windows=3, unless="clip_frac"),
    Rule("no_gradient", "always", lambda w: w["without a gradient"] > 0,
         "the log-probabilities have no gradient, so no weight is trained",
         "look for a frozen model, and for log-probabilities that are detached", windows=2),
    Rule("repeated_row_frac", "always", lambda w: w["rows"] >= 16 and w["repeated rows"] > 0.75 * w["rows"],
         "{repeated rows:.0f} of {rows:.0f} rows have the same log-probabilities as another row",
         "remove the seed from the request, and look at the temperature and the entropy", windows=2,
         unless="same_completion_frac"),
    Rule("ref_k3_kl", "first", lambda w: w.mean("reference k3") > K3,
         "the reference is not the policy at the first step (k3 {mean reference k3:.3g})",
         "load the weights that the policy starts from as the reference, unless it is another on purpose"),
    Rule("ref_k3_kl", "always",
         lambda w: f"{LARGEST}reference gap" in w and w[f"{LARGEST}reference gap"] == 0 and w["tokens"] > 0,
         "policy and reference are still equal at every token, so the reference follows the policy, or the "
         "policy does not train", "freeze the reference, and look at the learning rate",
         windows=16, by_update=True),
    Rule("teacher_gap", "always",
         lambda w: w["sees hints"] > 0 and w["hint tokens"] >= 64 and w[f"{LARGEST}teacher gap"] < 1e-3,
         "teacher and policy give every token the same probability, so the hint teaches nothing",
         "look at the teacher's prompts: a hint that is cut off or empty leaves the policy's own prompt"),
    Rule("teacher_agreement", "whole", lambda w: w["rows"] >= 64 and w.z("agreement") < -Z,
         "the teacher likes what was rewarded less than the policy does ({z agreement:.1f} standard errors): "
         "its hint teaches against the rewards", "measure the hints: composer-plugins teacher --control"),
    *(Rule(f"{channel}_token_frac", "always",
           lambda w, channel=channel: w[f"expects {channel}"] > 0 == w[f"{channel} tokens"],  # type: ignore[misc]
           f"{channel}_weight is set, and no token of the last {{windows}} windows had {what}",
           remedy + "; in PRIME-RL set [orchestrator.train] filter_zero_advantages = false, or groups of "
           "equal rewards are dropped with their stamps", windows=12)
      for channel, what, remedy in (
          ("hint", "a teacher's log-probability",
           "look at where hints come from: a column, success_reward_threshold, or stamps of the environment"),
          ("replay", "the mark of a pair", "stamp the completions of pairs in the environment"))),
    Rule("group_of_one_frac", "rollouts", lambda w: w["groups"] > 1 and w["groups of one"] == w["groups"],
         "the {rows:.0f} rollouts of this batch are {groups:.0f} groups of 1, because each has a uid of its "
         "own, and nothing can be compared within a group",
         "sample each prompt 2 times or more (GRPO: 8, for example), and give its rollouts one uid"),
    Rule("group_of_one_frac", "rollouts", lambda w: w["groups of one"] > max(1.0, 0.2 * w["groups"]),
         "{groups of one:.0f} of {groups:.0f} groups have one rollout, whose advantage compares with nothing",
         "look for prompts whose rollouts fail, and for uids that differ within a prompt",
         windows=2, unless="group_of_one_frac"),
    Rule("group_size", "rollouts", lambda w: w["largest group"] > w["rollouts of a prompt"] > 0,
         "a group has {largest group:.0f} rows, and a prompt {rollouts of a prompt:.0f} rollouts, so several "
         "prompts share a uid, or a session of an agent has several outputs, which are compared as rollouts",
         "give each prompt a uid of its own; for several outputs, set trainer.v1.trainer_mode=composer_sync, "
         "which groups them as verl does"),
    # A sparse reward leaves a few groups without a difference: 0, mostly.
    *(Rule("equal_group_frac", "rollouts", holds,
           "all rewards are equal in each of {groups:.0f} groups, for {windows} steps in a row, so every "
           "advantage within a group is 0",
           "look at the reward function, and at prompts that are always or never solved",
           windows=windows, unless="same_completion_frac equal_group_frac")
      for holds, windows in ((lambda w: w["groups"] == w["equal groups"] > (0 if w["one reward"] else 7), 3),
                             (lambda w: 0 < w["groups"] == w["equal groups"], 6))),
    Rule("equal_group_frac", "always", lambda w: w["alike"] > 0,
         "{alike:.0f} rows have an advantage, and all rewards of their groups are equal: the advantages were "
         "whitened or shifted again", "remove the second normalisation of the advantages"),
    Rule("same_completion_frac", "rollouts", lambda w: 0 < w["groups"] == w["same groups"],
         "in each of {groups:.0f} groups all completions are the same tokens",
         "remove the seed from the request, and sample at a temperature above 0", windows=2),
    Rule("constant_reward_frac", "rollouts", lambda w: 0 < w["constant rewards"] < w["reward functions"],
         "{constant rewards:.0f} of {reward functions:.0f} reward functions returned one number for every "
         "rollout, for {windows} steps in a row",
         "look at the function whose rewards/NAME/std is 0 in the log",
         windows=8, since_start=True),
    Rule("learning_rate", "weights", lambda w: w["learning rate"] == 0,
         "the learning rate is 0, for {windows} updates in a row, so nothing is learned",
         "set learning_rate, and look at the scheduler", windows=3),
    Rule("moved_frac", "weights",
         lambda w: w["learning rate"] > 0 and w["with a gradient"] > 0 == w["moved weights"],
         "no weight has changed in {windows} updates, though gradient and learning rate are not 0",
         "look at which parameters the optimizer has, and at updates below the last place of their dtype",
         windows=2),
    Rule("moved_frac", "weights",
         lambda w: w["low precision"] > 0 < w["learning rate"]
         and w["moved weights"] < 0.1 * w["with a gradient"],
         "{% moved weights over with a gradient} of the weights that have a gradient change in an update: "
         "the others move by less than the last place of their dtype",
         "keep float32 weights (load the model in float32 and set bf16=True), or raise learning_rate",
         windows=3, unless="moved_frac"),
    Rule("no_gradient", "weights", lambda w: w["with a gradient"] == 0,
         "no parameter has a gradient that is not 0, for {windows} updates in a row",
         "look for a frozen model, an adapter that does not train, or a loss that is cut off everywhere",
         windows=7, unless="empty_row_frac equal_group_frac zero_adv_frac"),
    Rule("pair_margin", "pairs", lambda w: w["trend"] < -5.0,
         "the margin of the pairs has fallen over 16 steps, to {margin:.3g}",
         "look at whether chosen and rejected are swapped, and at the sign and size of the other channels"),
)
