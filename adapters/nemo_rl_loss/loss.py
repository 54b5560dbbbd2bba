"""NeMo-RL's tensors -> a loss of the catalogue -> NeMo-RL's denominators.

`ComposerLoss` replaces ClippedPGLossFn, and `ComposerDistillationLoss` replaces
DistillationLossFn. Both divide by the valid tokens or sequences of the global batch, as NeMo-RL passes them,
so a cut into micro-batches, packed sequences or ranks leaves the gradient. NeMo-RL itself is imported when
it asks for the type of a loss, and not before.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_plugins.adapters.nemo_rl_loss.upstream import interfaces, moved, table_of
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError, DataError, log_info
from composer_plugins.frameworks.contract import NOTHING
from composer_plugins.frameworks.nemo_rl import LOSS, NEMO_RL
from composer_plugins.health import watch
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.masking import keep
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.finite import loss_not_finite, not_finite
from composer_plugins.losses.masks import boolean_mask
from composer_plugins.objective.objective import NORM
from composer_plugins.objective.options import described
from composer_plugins.objective.own_options import asked
from composer_plugins.objective.per_token import Terms, metric_sums, per_token

TOKEN_MEAN = "token-mean"
MODES = (TOKEN_MEAN, "seq-mean-token-sum", "seq-mean-token-mean", NORM)
PREFIX = "composer/"
NOT_OURS = {
    f"{LOSS}.positive_example_nll_weight": "its term is divided by the correct tokens of a micro-batch, "
    "which changes with the cut"
}


class NemoLoss:
    """What both losses share: the attributes that NeMo-RL reads, and its denominators."""

    input: str  # the name of a LossInputType
    mode: str
    length: float | None = None
    use_fused_linear_logprobs = False
    rebuilt: Callable[[], "NemoLoss"]  # from its options, in another process

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers parse the options again, which a Ray process has to do once."""
        return self.rebuilt, ()

    @property
    def input_type(self) -> Any:
        """Which tensors NeMo-RL calls the loss with."""
        return interfaces().LossInputType[self.input]

    @property
    def loss_type(self) -> Any:
        """Which count divides the gradient."""
        types = interfaces().LossType
        return types.TOKEN_LEVEL if self.mode == TOKEN_MEAN else types.SEQUENCE_LEVEL

    @property
    def metric_normalizations(self) -> dict[str, Any]:
        """Which count divides a metric, where it is not the gradient's: ours are means over tokens."""
        kinds = interfaces().MetricNormalizer
        names = {"num_valid_samples": kinds.NONE, "token_mult_prob_error": kinds.TOKENS}
        return Normalizations(kinds.TOKENS, names | {"gen_kl_error": kinds.TOKENS})

    def reduced(self, loss: Tensor, mask: Tensor, seqs: Tensor | None, toks: Tensor | None) -> Tensor:
        """The part of this micro-batch in the mean of the global batch."""
        mode: Any = self.mode
        total: Tensor = aggregate(
            loss, mask, mode, num_tokens=toks, num_sequences=seqs, max_length=self.length
        )
        return total


class Normalizations(dict[str, Any]):
    """A dict that has each of our metrics, also those that the loss does not report."""

    def __init__(self, tokens: Any, names: Mapping[str, Any]) -> None:
        super().__init__(names)
        self.tokens = tokens

    def get(self, name: str, default: Any = None) -> Any:
        """The count of a metric."""
        return self.tokens if name.startswith(PREFIX) else super().get(name, default)


class ComposerLoss(NemoLoss):
    """A policy loss with NeMo-RL's own terms added, for `grpo_train(..., loss_fn=...)`.

        total = policy_weight w_t policy_t + reference_policy_kl_penalty KL_t, divided as `mode` says

    `options` are the fields of ComposerConfig: policy, which has to be set, policy_params, policy_weight,
    rollout_correction, rollout_correction_params. `loss_config` is NeMo-RL's `master_config.loss_fn`: its KL
    and its correction act, and a clip that is moved is an error. `mode` is an aggregation mode, the last one
    with `max_length`; without it `token_level_loss` decides (a mean over tokens, or over sequences).
    Raises ConfigError for what is not understood, for a loss that needs what NeMo-RL does not have, and for a
    hint or a replay channel.
    """

    input = "LOGPROB"

    def __init__(
        self,
        loss_config: Any = NOTHING,
        *,
        mode: str | None = None,
        max_length: float | None = None,
        use_fused_linear_logprobs: bool = False,
        **options: Any,
    ) -> None:
        own = table_of(loss_config)
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        config = own if isinstance(loss_config, Mapping) else loss_config  # its class has the defaults
        how: dict[str, Any] = {"mode": mode, "max_length": max_length}
        more = {"use_fused_linear_logprobs": use_fused_linear_logprobs, **options}
        self.rebuilt = partial(ComposerLoss, config, **how, **more)
        how |= {"modes": MODES, "not_ours": NOT_OURS}
        found = asked(NEMO_RL, {LOSS: own}, options, **how, moved=moved(loss_config))
        self.terms = Terms.of(found.objective, found.config)
        self.mode, self.length = found.objective.mode, max_length
        self.forced = bool(own.get("force_on_policy_ratio"))
        self.health = watch.Health.of(found.config, found.objective.policy, "nemo-rl", self.mode)
        self.is_new = True

    @property
    def reference_policy_kl_penalty(self) -> float:
        """NeMo-RL computes log-probabilities without top-k and top-p for the KL where this is not 0."""
        kl = self.terms.objective.kl
        return kl.weight if self.terms.reads_reference and kl else 0.0

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss [] of one micro-batch, and metrics as numbers. `data` has the width tokens + 1.

        Raises DataError for a key of `data` that is absent or has another shape, and for a loss that is not
        finite. At the first call it checks the numbers of the masks and of the log-probabilities too.
        """
        sizes = [len(next_token_logprobs), next_token_logprobs.shape[1] + 1]
        mask, samples = mask_of(data, sizes, check=self.is_new)

        def next_tokens(name: str) -> Tensor:
            return tensor_of(data, name, sizes)[:, 1:]

        sampled = next_tokens("generation_logprobs")
        old = next_token_logprobs.detach() if self.forced else next_tokens("prev_logprobs")
        given = {
            "logprobs": next_token_logprobs,
            "old_logprobs": old,
            "rollout_logprobs": sampled,
            "advantages": next_tokens("advantages"),
            "mask": mask,
        }
        if self.terms.reads_reference:
            given["ref_logprobs"] = next_tokens("reference_policy_logprobs")
        if (unfiltered := data.get("curr_logprobs_unfiltered")) is not None:
            given["unfiltered_logprobs"] = unfiltered
        if self.is_new:
            log_info(described(NEMO_RL, self.terms.objective.policy, self.mode))
        token = per_token(self.terms, given, check=self.is_new)
        self.is_new = False
        how: dict[str, Any] = {
            "rows": global_valid_seqs,
            "without": ("k3_kl",),
        }  # its gen_kl_error
        measured = self.health.micro_batch(given, token.metrics, **how)
        token = TokenLoss(token.loss, token.metrics | watch.per_token(measured, mask))
        loss = self.reduced(token.loss, mask, global_valid_seqs, global_valid_toks)
        gap = keep(sampled - old, mask)  # NeMo-RL's trainers read these two
        ours = {
            "token_mult_prob_error": keep(gap.abs().exp(), mask).sum(),
            "gen_kl_error": keep((-gap).expm1() + gap, mask).sum(),
        }
        found = reported(loss, token, mask, samples, global_valid_toks, ours)
        require_finite(found["loss"], self.terms.objective.policy, given)
        return loss, found


class ComposerDistillationLoss(NemoLoss):
    """A divergence from the teacher's top k, for `distillation_train(..., loss_fn=...)`.

    NeMo-RL gives the loss the log-probabilities of student and teacher at the teacher's k largest entries,
    each normalised over these k. They take the place of the vocabulary, so any divergence of logits can be
    named: `hint_divergence` with `hint_params`. Without it, `kl_type` "forward" or "reverse" chooses. `mode`
    and `max_length` as in `ComposerLoss`; by default the mean over tokens.
    Raises ConfigError for `zero_outside_topk`, and for a divergence that needs anything else.
    """

    input = "DISTILLATION"
    kl_type, zero_outside_topk = "forward", False  # what prepare_loss_input reads

    def __init__(
        self,
        loss_config: Any = NOTHING,
        *,
        mode: str = TOKEN_MEAN,
        max_length: float | None = None,
        **options: Any,
    ) -> None:
        own = table_of(loss_config)
        self.rebuilt = partial(ComposerDistillationLoss, own, mode=mode, max_length=max_length, **options)
        self.mode, self.length = mode, max_length
        if own.get("zero_outside_topk"):
            problem = "it is true, and the loss gets the student's k entries alone, and not the rest"
            raise ConfigError(f"{LOSS}.zero_outside_topk", problem, "set it to false")
        if mode not in MODES or (mode == NORM) != (max_length is not None):
            raise ConfigError(
                "mode", f"it is {mode!r}", f"set one of {', '.join(MODES)}, the last with max_length"
            )
        named = {"forward": "forward_kl", "reverse": "reverse_kl"}.get(own.get("kl_type", ""))
        if "hint_divergence" not in options and named is None:
            problem = f"it is {own.get('kl_type', 'mixed')!r}, which no row of the catalogue is"
            raise ConfigError(
                f"{LOSS}.kl_type", problem, "set 'forward' or 'reverse', or name hint_divergence"
            )
        allowed = {"hint_divergence", "hint_params"}
        if others := sorted(set(options) - allowed):
            raise ConfigError(
                others[0], "a distillation reads no such option", f"set {' or '.join(sorted(allowed))}"
            )
        config = ComposerConfig.parse(
            {"hint_divergence": named, **options, "policy_weight": 0.0, "hint_weight": 1.0}
        )
        self.divergence = config.choose_hint()
        NEMO_RL.require(self.divergence)
        self.is_new = True

    def __call__(
        self,
        student_topk_logprobs: Tensor,
        teacher_topk_logprobs: Tensor,
        H_all: Tensor | None,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss [] of one micro-batch, and metrics as numbers. DataError as from `ComposerLoss`."""
        sizes = [len(student_topk_logprobs), student_topk_logprobs.shape[1] + 1]
        mask, samples = mask_of(data, sizes, check=self.is_new, is_cut=True)
        given = {
            "student_logits": student_topk_logprobs,
            "teacher_logits": teacher_topk_logprobs,
            "mask": mask,
        }
        token: TokenLoss = call(self.divergence, given, check=self.is_new)
        self.is_new, kept = False, TokenLoss(keep(token.loss, mask), token.metrics)
        loss = self.reduced(kept.loss, mask, global_valid_seqs, global_valid_toks)
        found = reported(loss, kept, mask, samples, global_valid_toks)
        sides = {"student_logprobs": student_topk_logprobs, "teacher_logprobs": teacher_topk_logprobs}
        require_finite(found["loss"], self.divergence, {**sides, "mask": mask.unsqueeze(-1)})
        return loss, found


def tensor_of(data: Mapping[str, Any], name: str, sizes: list[int], *, is_cut: bool = False) -> Tensor:
    """data[name] of these sizes, [B] or [B, S]. With `is_cut` it may be longer, and the end is cut off.

    Raises DataError if it is absent or has another shape.
    """
    found, axes = data.get(name), ("[B], one number per sample", "[B, S], one number per token")
    cut = found[..., : sizes[-1]] if is_cut and found is not None else found
    if cut is None or list(cut.shape) != sizes:
        problem = "it is not there" if found is None else f"its shape is {list(found.shape)}"
        raise DataError(f"data[{name!r}]", problem, f"pass {axes[len(sizes) - 1]}, here {sizes}")
    return cut


def mask_of(
    data: Mapping[str, Any], sizes: list[int], *, check: bool, is_cut: bool = False
) -> tuple[Tensor, Tensor]:
    """The unmasked tokens of the samples that count, [B, S - 1], and data["sample_mask"], [B]."""
    samples = tensor_of(data, "sample_mask", sizes[:1])
    rows = boolean_mask("data['sample_mask']", samples, check=check).unsqueeze(-1)
    tokens = tensor_of(data, "token_mask", sizes, is_cut=is_cut)[:, 1:]
    return boolean_mask("data['token_mask']", tokens, check=check) & rows, samples


def require_finite(loss: float, choice: Choice, inputs: Mapping[str, Tensor]) -> None:
    """Raise DataError for a loss that is not finite, with the input, the row and the token it comes from."""
    if not math.isfinite(loss):
        name, problem = next(not_finite(inputs), ("", ""))
        raise loss_not_finite(f"{choice.loss.kind} {choice.name!r}", name, problem)


def reported(
    loss: Tensor,
    token: TokenLoss,
    mask: Tensor,
    samples: Tensor,
    tokens: Tensor | None,
    more: Mapping[str, Tensor] = NOTHING,
) -> dict[str, float]:
    """The metrics that NeMo-RL adds up over micro-batches: means over the tokens of the global batch."""
    count = mask.sum() if tokens is None else tokens
    ours = metric_sums(token.metrics, mask)
    sums = {**{f"{PREFIX}{name}": value for name, value in ours.items()}, **more}
    means = {name: value / torch.as_tensor(count).clamp(min=1) for name, value in sums.items()}
    found = {"loss": loss.detach(), **means, "num_valid_samples": samples.sum()}
    return dict(zip(found, torch.stack([x.detach().double() for x in found.values()]).tolist(), strict=True))
