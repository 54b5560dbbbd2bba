"""The inputs of losses by name. A loss that needs any other input cannot be run by an adapter.

Adapters declare which of these they provide, so a loss that a framework has no inputs for is refused when it
is configured. Shapes are written as in `kernels/README.md`.
"""

from typing import NamedTuple

from composer_plugins.errors import DataError

# Rounding may put a log-probability above 0. An engine that computes in bfloat16 subtracts numbers of 8 bits:
# between 16 and 32 neighbouring ones are 0.125 apart, and +0.03 to +0.125 was seen. A larger number is not
# a log-probability, whatever the precision.
LARGEST_LOGPROB = 0.125


def positive_logprob(key: str, shown: str) -> DataError:
    """The error at `key` for log-probabilities above `LARGEST_LOGPROB`; `shown` is one of them, in words."""
    problem = f"it holds {shown}, and a log-probability is at most 0, or {LARGEST_LOGPROB} where bfloat16 "
    problem += "has rounded it"
    remedy = "pass log pi(y_t) in nats, not probabilities, logits or negative log-likelihoods"
    return DataError(key, problem, remedy)


FLOAT, BOOLEAN, INTEGER, COUNT = "floating-point", "boolean", "integer", "integer or floating-point"


class Input(NamedTuple):
    """One input that a kernel takes by name: a tensor, unless the shape says otherwise."""

    shape: str
    meaning: str
    dtype: str = FLOAT

    @property
    def help(self) -> str:
        """What it is, for a page."""
        return self.meaning if self.dtype == FLOAT else f"{self.dtype}; {self.meaning}"


TOKENS, VOCAB, TOP_K = "[*batch, tokens]", "[*batch, tokens, vocab]", "[*batch, tokens, k]"
PAIRS, ROWS = "[pairs]", "[rows]"

INPUTS: dict[str, Input] = {
    "logprobs": Input(TOKENS, "log pi(y_t) under the policy; carries the gradient"),
    "old_logprobs": Input(TOKENS, "log pi_old(y_t) under the policy before this round of updates (proximal)"),
    "rollout_logprobs": Input(TOKENS, "log-probability of y_t under the engine that sampled (behaviour)"),
    "ref_logprobs": Input(TOKENS, "log pi_ref(y_t) under a frozen reference"),
    "region_logprobs": Input(
        TOKENS, "log-probability of y_t under the policy at the centre of a trust region"
    ),
    "advantages": Input(TOKENS, "broadcast against logprobs: [B, 1] is one per sequence"),
    "mask": Input(
        TOKENS,
        "True on the unmasked tokens; for an advantage [rows], True on the rollouts that count",
        BOOLEAN,
    ),
    "log_weights": Input(TOKENS, "logs of rollout corrections, old over rollout, in nats"),
    "entropies": Input(TOKENS, "entropy of the policy at each token, in nats"),
    "generator": Input("a torch.Generator", "the source of a loss's random numbers"),
    "uniform": Input(
        TOKENS, "random numbers in [0, 1), in place of a generator, which torch.compile cannot trace"
    ),
    "topk_logprobs": Input(TOP_K, "log pi of k given vocabulary entries under the policy"),
    "rollout_topk_logprobs": Input(
        TOP_K, "log-probabilities of the same k entries under the engine that sampled"
    ),
    "support_logprobs": Input(
        TOP_K, "log pi of every entry that could be sampled, normalised over them; carries the gradient"
    ),
    "rollout_support_logprobs": Input(
        TOP_K, "log-probabilities of the same entries under the engine that sampled; -inf where padded"
    ),
    "student_logits": Input(VOCAB, "unnormalised, of the student; carries the gradient"),
    "teacher_logits": Input(VOCAB, "unnormalised, of the teacher"),
    "student_logprobs": Input(TOKENS, "log S(y_t) of the sampled tokens; carries the gradient"),
    "teacher_logprobs": Input(TOKENS, "log T(y_t) of the sampled tokens"),
    "teacher_topk_logprobs": Input(TOP_K, "log T of the teacher's k largest entries"),
    "teacher_topk_ids": Input(TOP_K, "the ids of the teacher's k largest entries", INTEGER),
    "chosen": Input(PAIRS, "score of the preferred completion under the policy; carries the gradient"),
    "rejected": Input(PAIRS, "score of the rejected completion under the policy"),
    "ref_chosen": Input(PAIRS, "score of the preferred completion under the reference"),
    "ref_rejected": Input(PAIRS, "score of the rejected completion under the reference"),
    "chosen_nll": Input(PAIRS, "mean negative log-likelihood per token of the preferred completion"),
    "gold_nll": Input(PAIRS, "mean negative log-likelihood per token of a third, gold completion"),
    "scores": Input(ROWS, "score of a completion under the policy; carries the gradient"),
    "ref_scores": Input(ROWS, "score of a completion under the reference"),
    "desirable": Input(ROWS, "True where a completion is good", BOOLEAN),
    "reference_kl": Input(
        "[]", "KTO's reference point: mean log-ratio of mismatched completions, at least 0"
    ),
    "reward_shift": Input("[]", "BCO's delta: running mean of the rewards, in nats"),
    "rewards": Input(ROWS, "one per rollout"),
    "group_ids": Input(ROWS, "rollouts of one prompt share an id, in any order", INTEGER),
    "num_groups": Input("an int", "the ids are 0 .. num_groups - 1 already, and need no sort"),
    "lengths": Input(ROWS, "unmasked tokens of each rollout", COUNT),
    "prompt_tokens": Input(ROWS, "unmasked tokens of all rollouts of the same prompt, for each rollout"),
    "baselines": Input("[*batch]", "reward of the greedy completion of the same prompt, one per rollout"),
    "reference_rewards": Input(
        "[rows, samples]", "rewards of completions of the same prompt by the reference policy"
    ),
    "sum_pi_squared": Input(TOKENS, "sum of the squared probabilities of the vocabulary, old policy"),
    "correction_weights": Input(TOKENS, "weights of a rollout correction, old policy over rollout policy"),
    "reward_components": Input("[rows, components]", "several rewards of each rollout"),
    "token_rewards": Input(TOKENS, "reward of each token, most often 0 but at the last one"),
    "values": Input(TOKENS, "a critic's estimate of the return from each token on"),
    "component_mask": Input("[rows, components]", "False where a reward could not be given", BOOLEAN),
    "component_weights": Input("[components]", "weight of each reward; all 1 where not given"),
    "logits": Input(VOCAB, "unnormalised, of the policy; carries the gradient"),
    "token_loss": Input(TOKENS, "the loss per token that a kernel returned"),
}

# By side of a pair, the inputs that are computed from the policy's log-probabilities of this completion. A
# loss that needs none of a side's inputs, as "sft" of the rejected side's, needs no forward pass of it.
OF_SIDE: dict[str, frozenset[str]] = {
    "chosen": frozenset({"chosen", "chosen_nll"}),
    "rejected": frozenset({"rejected"}),
}
