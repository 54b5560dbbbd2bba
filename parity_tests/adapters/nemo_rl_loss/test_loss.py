"""NeMo-RL's loss function without NeMo-RL: recorded numbers, cuts of the batch, and what is refused."""

import pickle
import sys
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from composer_plugins.adapters.nemo_rl_loss.loss import MODES, ComposerDistillationLoss, ComposerLoss
from composer_plugins.adapters.nemo_rl_loss.upstream import moved
from composer_plugins.errors import ComposerError, ConfigError, DataError
from composer_plugins.frameworks.contract import NamedLoss
from composer_plugins.frameworks.nemo_rl import NEMO_RL
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.choosing import find_one
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import of_kind
from composer_plugins.objective.objective import NORM
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import golden, nemo_rl_doubles
from parity_tests.rigs.golden import Case, claim
from parity_tests.rigs.nemo_rl_doubles import counts, data, wider
from parity_tests.rigs.pasted import to_paste

pytestmark = pytest.mark.filterwarnings("ignore:.*bounds the ratio of a sequence")
NO_KL = {"reference_policy_kl_penalty": 0.0}
FULL = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": 1.05,
    "reference_policy_kl_penalty": 0.1,
}
POLICIES = ("grpo", "cispo", "gspo@nemo-rl", "dppo_tv", "sapo", "masked_is", "reinforce")


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The double of NeMo-RL's types, in the place of NeMo-RL."""
    found = nemo_rl_doubles.interfaces()
    for name in ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss", nemo_rl_doubles.MODULE):
        monkeypatch.setitem(sys.modules, name, found)
    return found


def own_loss(options: Any, **more: Any) -> ComposerLoss:
    """NeMo-RL's own loss as ours."""
    return ComposerLoss(options, policy="grpo@nemo-rl", **more)


def value_and_gradient(
    loss: Any, logprobs: Tensor, batch: dict[str, Tensor], *totals: Tensor
) -> list[Tensor]:
    """Of one micro-batch of the batch with these counts."""
    found, _ = loss(
        next_token_logprobs=logprobs, data=batch, global_valid_seqs=totals[0], global_valid_toks=totals[1]
    )
    return [found, torch.autograd.grad(found, logprobs)[0]]


@claim("nemo_rl_policy")
def test_the_loss_equals_recorded_numbers(case: Case) -> None:
    """The options of the case are NeMo-RL's own, and what the error says to paste has their meaning."""
    old, advantages = golden.tensor(case["old_log_prob"]), golden.tensor(case["advantages"])
    batch = {
        "token_mask": wider(golden.tensor(case["response_mask"])),
        "sample_mask": golden.tensor(case["sample_mask"]),
        "advantages": wider(advantages.expand(old.shape)),
        "prev_logprobs": wider(old),
        "generation_logprobs": wider(old),
    }
    logprobs = golden.tensor(case["log_prob"]).requires_grad_()
    given = {**NO_KL, **case["kwargs"]}
    clips = {*CLIPS} & {*given}
    loss = paste(given, policy="grpo@nemo-rl")[1] if clips else own_loss(given)
    ours = value_and_gradient(loss, logprobs, batch, *counts(batch))
    theirs = [golden.tensor(case["loss"]), golden.tensor(case["grad_log_prob"])]
    # NeMo-RL's denominators are n + 1e-8, as far from n as float32 is from float64.
    for mine, want in zip(ours, theirs, strict=True):
        assert_parity(mine, want, terms=8, dtype=torch.float32, magnitude=max(float(want.abs().max()), 1e-2))


@pytest.mark.filterwarnings("ignore:.*is reduced by")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_cut_into_micro_batches_leaves_the_gradient(policy: str, mode: str) -> None:
    """Ranks too are parts: NeMo-RL adds up their gradients."""
    length = 10.0 if mode.endswith("norm") else None
    has_ratio = (
        "rollout_logprobs" in find_one(policy, "policy").loss.needs
    )  # which a correction would be twice
    own = {"reference_policy_kl_penalty": 0.1} if has_ratio else FULL
    loss = ComposerLoss(own, policy=policy, mode=mode, max_length=length)
    logprobs, batch = data()
    totals = counts(batch)
    whole = value_and_gradient(loss, logprobs, batch, *totals)
    for parts in (2, 4):
        cut = {name: x.chunk(parts) for name, x in batch.items()}
        pieces = [
            value_and_gradient(
                loss,
                logprobs[i * 4 // parts : (i + 1) * 4 // parts].detach().requires_grad_(),
                {name: x[i] for name, x in cut.items()},
                *totals,
            )
            for i in range(parts)
        ]
        assert_parity(sum(one[0] for one in pieces), whole[0], terms=24, magnitude=10.0)
        assert_parity(torch.cat([one[1] for one in pieces]), whole[1], terms=24, what="gradient")


def test_nan_behind_the_mask_stays_behind_it() -> None:
    logprobs, batch = data()
    loss = own_loss(FULL)
    want = value_and_gradient(loss, logprobs, batch, *counts(batch))
    mask = (batch["token_mask"] * batch["sample_mask"].unsqueeze(-1)).bool()
    junk = dict(batch)
    for name in ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        junk[name] = torch.where(mask, batch[name], torch.nan)
    dirty = torch.where(mask[:, 1:], logprobs.detach(), torch.nan).requires_grad_()
    got = value_and_gradient(loss, dirty, junk, *counts(batch))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert not got[1][~mask[:, 1:]].any()


def test_a_packed_sequence_is_a_part(module: Any) -> None:
    """As SequencePackingLossWrapper calls it: one row without its padding, and sums of numbers."""
    logprobs, batch = data()
    loss = ComposerLoss(FULL, policy="gspo@nemo-rl", mode="seq-mean-token-mean")
    totals = counts(batch)
    whole = value_and_gradient(loss, logprobs, batch, *totals)[0]
    total = torch.zeros(())
    for i in range(4):
        row = {name: x[i : i + 1] for name, x in batch.items()}
        total = total + value_and_gradient(loss, logprobs[i : i + 1], row, *totals)[0].detach()
    assert_parity(total, whole, terms=24)
    metrics = loss(logprobs, batch, *totals)[1]
    assert {"loss", "num_valid_samples", "token_mult_prob_error", "gen_kl_error"} <= metrics.keys()
    assert all(type(x) is float for x in metrics.values()) and metrics["num_valid_samples"] == 3
    assert not [name for name in metrics if "_min" in name or "_max" in name]  # NeMo-RL does not divide those


def test_types_name_the_denominator_and_the_input(module: Any) -> None:
    by_token, by_sequence = own_loss(NO_KL), own_loss({**NO_KL, "token_level_loss": False})
    assert by_token.input_type is module.LossInputType.LOGPROB
    assert by_token.loss_type is module.LossType.TOKEN_LEVEL
    assert by_sequence.loss_type is module.LossType.SEQUENCE_LEVEL
    counted = by_sequence.metric_normalizations
    assert isinstance(counted, dict) and counted.get("loss") is None  # as the gradient
    assert counted.get("composer/ratio") is module.MetricNormalizer.TOKENS
    assert counted.get("num_valid_samples") is module.MetricNormalizer.NONE
    assert by_token.reference_policy_kl_penalty == 0 and own_loss(FULL).reference_policy_kl_penalty == 0.1
    distilled = ComposerDistillationLoss({"kl_type": "forward"})
    assert distilled.input_type is module.LossInputType.DISTILLATION and not distilled.zero_outside_topk


@pytest.mark.filterwarnings("ignore:.*is reduced by")
def test_a_loss_goes_to_a_worker_in_a_pickle() -> None:
    logprobs, batch = data()
    loss = ComposerLoss(FULL, policy="sapo", policy_params={"tau_neg": 2.0}, use_fused_linear_logprobs=True)
    there = pickle.loads(pickle.dumps(loss))
    assert there.use_fused_linear_logprobs
    ours, theirs = (value_and_gradient(one, logprobs, batch, *counts(batch)) for one in (loss, there))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    distilled = pickle.loads(pickle.dumps(ComposerDistillationLoss(hint_divergence="jsd")))
    assert distilled.divergence.name == "jsd"


def paste(options: Any, **more: Any) -> tuple[list[str], ComposerLoss]:
    """The options that are to be removed, and the loss without them and with the line that is pasted."""
    keys, line = to_paste(lambda: ComposerLoss(options, **more))
    kept = {key: x for key, x in dict(options).items() if f"loss_fn.{key}" not in keys}
    config = kept if isinstance(options, dict) else type(options)(**kept)
    return keys, ComposerLoss(config, **{**more, **eval(f"dict({line})")})


CLIPS = {
    "ratio_clip_min": (0.01, "clip_low"),
    "ratio_clip_max": (0.9, "clip_high"),
    "ratio_clip_c": (1.2, "dual_clip"),
}
OWN = [
    (named, {key: value}, {param: value})
    for named in NEMO_RL.losses
    if named.kind == "policy"
    for key, (value, param) in CLIPS.items()
]


@pytest.mark.filterwarnings("ignore:.*is reduced by")
@pytest.mark.parametrize("named, clip, params", OWN)
def test_a_pasted_line_trains_what_nemo_rls_option_says(
    named: NamedLoss, clip: dict[str, float], params: dict[str, float]
) -> None:
    """Its option beside its own loss is that parameter: `conform nemo-rl` and recorded numbers say so."""
    logprobs, batch = data(rows=8)
    gap = torch.tensor([-0.4, 0.1, 0.1, -0.4] * 2).unsqueeze(-1)  # ratios of 1.5, and of 0.9
    batch["prev_logprobs"] = wider((logprobs.detach() + gap).clamp(max=-1e-3))
    keys, pasted = paste({**NO_KL, **clip}, policy=named.row)
    has_it = {*params} <= {*find_one(named.row, "policy").loss.parameters}
    wanted = ComposerLoss(NO_KL, policy=named.row, policy_params=params if has_it else {})
    assert keys == [f"loss_fn.{key}" for key in clip]
    ours, want, plain = (
        value_and_gradient(one, logprobs, batch, *counts(batch))
        for one in (pasted, wanted, ComposerLoss(NO_KL, policy=named.row))
    )
    assert torch.equal(ours[0], want[0]) and torch.equal(ours[1], want[1])
    assert torch.equal(want[1], plain[1]) != has_it


def test_policy_has_to_be_set() -> None:
    for chosen, own in (({}, "grpo@nemo-rl"), ({"use_cispo": True}, "cispo@nemo-rl")):
        with pytest.raises(ConfigError) as error:
            ComposerLoss({**NO_KL, **chosen})
        assert str(error.value) == f"policy: it is not set; name a loss: policy={own!r} is NeMo-RL's own"


class Clipped(BaseModel, extra="allow"):
    """The options of a release with defaults of its own."""

    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.3
    reference_policy_kl_penalty: float = 0.0


def test_an_option_is_moved_from_the_default_of_its_class() -> None:
    assert moved(Clipped()) == {}
    assert moved(Clipped(ratio_clip_max=0.2, ratio_clip_c=3.0)) == {
        "loss_fn.ratio_clip_max": 0.2,
        "loss_fn.ratio_clip_c": 3.0,
    }
    there = pickle.loads(pickle.dumps(ComposerLoss(Clipped(), policy="dapo")))
    assert there.terms.objective.policy.name == "dapo"
    keys, pasted = paste(Clipped(ratio_clip_max=0.2), policy="ppo")
    assert keys == ["loss_fn.ratio_clip_max"] and pasted.terms.objective.policy.params == {"clip_high": 0.2}


def test_the_log_says_what_trains_where_a_default_is_typed(caplog: pytest.LogCaptureFixture) -> None:
    logprobs, batch = data()
    typed = {**NO_KL, "ratio_clip_min": 0.2, "ratio_clip_max": 0.28}
    keys, loss = paste(typed, policy="gspo", mode="seq-mean-token-mean")
    for _ in range(2):
        value_and_gradient(loss, logprobs, batch, *counts(batch))
    assert keys == ["loss_fn.ratio_clip_max"]
    assert caplog.messages == [
        "policy gspo(clip_low=0.0003, clip_high=0.28), seq-mean-token-mean; NeMo-RL's options for the "
        "parameters of its own policy losses are not read"
    ]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "a hint": (NO_KL, {"hint_weight": 0.1}, "hint_weight", "no log-probabilities of a teacher"),
    "pairs": (NO_KL, {"replay_weight": 1.0}, "replay_weight", "has no pairs"),
    "an advantage": (NO_KL, {"advantage": "rloo"}, "advantage", "options of its own"),
    "a sum": (NO_KL, {"mode": "token-sum"}, "mode", "no denominator"),
    "a mean over prompts": (NO_KL, {"mode": "prompt-mean"}, "mode", "no denominator"),
    "a constant without its length": (NO_KL, {"mode": "seq-mean-token-sum-norm"}, "max_length", "not set"),
    "a length without its mode": (NO_KL, {"max_length": 9.0}, "max_length", "reads none"),
    "two policies": (
        {**NO_KL, "use_cispo": True},
        {"policy": "sapo"},
        "loss_fn.use_cispo",
        "chooses 'cispo@nemo-rl', and policy names 'sapo'",
    ),
    "two policies of NeMo-RL": (
        {**NO_KL, "use_cispo": True, "disable_ppo_ratio": True},
        {"policy": "cispo"},
        "loss_fn.disable_ppo_ratio",
        "chooses a loss that is not in the catalogue",
    ),
    "two corrections": (FULL, {"rollout_correction": "tis"}, "rollout_correction", "already"),
    "NeMo-RL's correction of a ratio to the rollout": (FULL, {"policy": "dppo_tv"}, "policy", "second one"),
    "VAPO's term": (
        {**NO_KL, "positive_example_nll_weight": 0.1},
        {},
        "loss_fn.positive_example_nll_weight",
        "changes with the cut",
    ),
    "a misspelt policy": (NO_KL, {"policy": "gropo"}, "policy", "unknown policy loss"),
    "a statistic of the batch": (NO_KL, {"policy": "clip_cov"}, "policy", "statistic of the whole batch"),
    "a loss that needs a support": (NO_KL, {"policy": "dppo_topk_tv"}, "policy", "needs topk_logprobs"),
    "a type of truncation that is none": (
        {**NO_KL, "use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tsi"},
        {},
        "loss_fn.truncated_importance_sampling_type",
        "tsi",
    ),
}


@pytest.mark.parametrize("own, options, key, problem", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_delivered_is_refused(
    own: dict[str, Any], options: dict[str, Any], key: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as error:
        ComposerLoss(own, **{"policy": "grpo@nemo-rl", **options})
    found = [error.value, *error.value.others]
    assert key in [one.key for one in found], [str(one) for one in found]
    assert problem in next(str(one) for one in found if one.key == key)


def test_a_mode_of_another_paper_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="token_level_loss: it is 'true', and 'gspo' is reduced by"):
        ComposerLoss(NO_KL, policy="gspo")
    ComposerLoss(NO_KL, policy="gspo", mode="seq-mean-token-mean")


@pytest.mark.parametrize("name", ["rloo", "dr_grpo"])
def test_a_denominator_that_only_our_option_has_is_named(name: str) -> None:
    own = find_one(name, "policy").loss.mode
    with pytest.warns(UserWarning, match=f"set mode={own!r}"):
        ComposerLoss(NO_KL, policy=name)
    ComposerLoss(NO_KL, policy=name, mode=own, max_length=8 if own == NORM else None)


def summed(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """A loss with one number for the whole batch, which no denominator of NeMo-RL's fits."""
    return TokenLoss((-advantages * logprobs * mask).sum(), {})


def junk_behind_the_mask(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """A loss that is not 0 where the mask is False."""
    return TokenLoss(-advantages * logprobs, {})


def test_wrong_result_types_of_a_users_loss_are_refused() -> None:
    logprobs, batch = data()
    for name in ("summed",):
        with pytest.raises(ComposerError, match="returned the shape"):
            value_and_gradient(
                ComposerLoss(NO_KL, policy=f"{__name__}:{name}"), logprobs, batch, *counts(batch)
            )


def test_a_users_loss_is_masked() -> None:
    logprobs, batch = data()
    user = ComposerLoss(NO_KL, policy=f"{__name__}:junk_behind_the_mask")
    ours, want = (
        value_and_gradient(one, logprobs, batch, *counts(batch))
        for one in (user, ComposerLoss(NO_KL, policy="reinforce"))
    )
    assert_parity(ours[0], want[0], terms=24)
    assert torch.equal(ours[1], want[1])


@pytest.mark.parametrize("name", sorted(of_kind(losses(), "policy")))
def test_every_policy_is_run_or_refused(name: str) -> None:
    """Nothing but a ConfigError, and where there is none, a gradient that is finite."""
    loss = of_kind(losses(), "policy")[name]
    params = {key: one.example for key, one in loss.parameters.items() if one.example is not None}
    logprobs, batch = data()
    try:
        found = ComposerLoss(NO_KL, policy=name, policy_params=params, mode="token-mean")
    except ConfigError:
        return
    assert value_and_gradient(found, logprobs, batch, *counts(batch))[1].isfinite().all()


def test_a_distillation_refuses_what_it_does_not_get() -> None:
    for own, options, key in (
        ({"zero_outside_topk": True}, {}, "loss_fn.zero_outside_topk"),
        ({}, {}, "loss_fn.kl_type"),
        ({}, {"hint_divergence": "sampled_token"}, "hint_divergence"),
        ({}, {"hint_divergence": "jsd", "hint_weight": 2.0}, "hint_weight"),
        ({}, {"hint_divergence": "jsd", "mode": "token-sum"}, "mode"),
    ):
        with pytest.raises(ConfigError) as error:
            ComposerDistillationLoss(own, **options)
        assert error.value.key == key


def test_a_distillation_is_cut_and_is_zero_for_equal_distributions() -> None:
    g = torch.Generator().manual_seed(0)
    student = torch.randn(4, 5, 3, generator=g, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(4, 5, 3, generator=g, dtype=torch.float64).log_softmax(-1)
    batch = {"token_mask": torch.ones(4, 6), "sample_mask": torch.tensor([1.0, 1.0, 1.0, 0.0])}
    loss = ComposerDistillationLoss(hint_divergence="jsd", hint_params={"beta": 0.3})
    totals = torch.tensor(3.0), torch.tensor(15.0)

    def of(rows: slice) -> Tensor:
        part = {name: x[rows] for name, x in batch.items()}
        found: Tensor = loss(student[rows].log_softmax(-1), teacher[rows], None, part, *totals)[0]
        return found

    whole, parts = of(slice(None)), of(slice(0, 2)) + of(slice(2, 4))
    assert_parity(parts, whole, terms=15)
    gradients = [torch.autograd.grad(x, student)[0] for x in (parts, whole)]
    assert_parity(gradients[0], gradients[1], terms=15, what="gradient")
    same, _ = loss(teacher, teacher, None, batch, *totals)
    assert abs(float(same)) < 1e-12


# Batches that are wrong
PLACE = (2, 2)  # row and token of an unmasked token


def changed(batch: dict[str, Tensor], key: str, value: float) -> dict[str, Tensor]:
    """The batch with this number at PLACE."""
    there = batch[key].clone()
    there[PLACE[0], PLACE[1] + 1] = value
    return batch | {key: there}


@pytest.mark.parametrize(
    "key, name, remedy",
    [
        ("advantages", "advantages", "look at the rewards"),
        ("prev_logprobs", "old_logprobs", "look at the norm of the gradient"),
        ("generation_logprobs", "rollout_logprobs", "that the rollout engine returned"),
        ("reference_policy_logprobs", "ref_logprobs", "not finite in the reference of this run"),
    ],
)
def test_a_loss_that_is_not_finite_names_input_row_and_token(key: str, name: str, remedy: str) -> None:
    logprobs, batch = data()
    loss = own_loss(FULL)
    value_and_gradient(loss, logprobs, batch, *counts(batch))
    with pytest.raises(DataError, match=f"^policy 'grpo@nemo-rl': the loss is not finite.*{remedy}") as error:
        value_and_gradient(loss, logprobs, changed(batch, key, torch.nan), *counts(batch))
    place = f"at row {PLACE[0]}, token {PLACE[1]}; "
    assert f"1 of 14 values of {name} are not finite, the first (nan) {place}" in str(error.value)


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_distillation_that_is_not_finite_names_the_side(side: str) -> None:
    tops = {one: torch.full((2, 3, 4), 0.25, dtype=torch.float64).log() for one in ("student", "teacher")}
    batch = {"token_mask": torch.ones(2, 4), "sample_mask": torch.ones(2)}
    loss = ComposerDistillationLoss({"kl_type": "forward"})
    loss(tops["student"], tops["teacher"], None, batch, None, None)
    tops[side][1, 2, 0] = torch.nan
    with pytest.raises(DataError, match=rf"1 of 24 values of {side}_logprobs .* \(nan\) at row 1, token 2"):
        loss(tops["student"], tops["teacher"], None, batch, None, None)


KEYS = ("advantages", "token_mask", "generation_logprobs", "prev_logprobs", "reference_policy_logprobs")


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_is_absent_or_misshapen_is_named_with_its_shape(key: str) -> None:
    logprobs, batch = data()
    wrong = {
        "it is not there": {name: x for name, x in batch.items() if name != key},
        r"its shape is \[4, 1\]": batch | {key: batch[key][:, :1]},
        r"its shape is \[4\]": batch | {key: batch[key][:, 0]},
        r"its shape is \[4, 6\]": batch | {key: batch[key][:, 1:]},
    }
    for problem, given in wrong.items():
        remedy = r"pass \[B, S\], one number per token, here \[4, 7\]"
        with pytest.raises(DataError, match=rf"^data\['{key}'\]: {problem}; {remedy}$"):
            own_loss(FULL)(logprobs, given, *counts(batch))


def test_a_sample_mask_that_is_absent_or_misshapen_is_named() -> None:
    logprobs, batch = data()
    absent = {name: x for name, x in batch.items() if name != "sample_mask"}
    for given, problem in (
        (absent, "it is not there"),
        (batch | {"sample_mask": torch.ones(4, 1)}, r"its shape is \[4, 1\]"),
    ):
        remedy = r"pass \[B\], one number per sample, here \[4\]"
        with pytest.raises(DataError, match=rf"^data\['sample_mask'\]: {problem}; {remedy}$"):
            own_loss(NO_KL)(logprobs, given, *counts(batch))


def test_a_distillation_names_its_masks_and_takes_wider_ones() -> None:
    top = torch.full((2, 3, 4), 0.25, dtype=torch.float64).log()
    for key in ("token_mask", "sample_mask"):
        batch = {"token_mask": torch.ones(2, 9), "sample_mask": torch.ones(2)}
        ComposerDistillationLoss(hint_divergence="jsd")(top, top, None, batch, None, None)
        del batch[key]
        with pytest.raises(DataError, match=rf"^data\['{key}'\]: it is not there"):
            ComposerDistillationLoss(hint_divergence="jsd")(top, top, None, batch, None, None)


@pytest.mark.parametrize("key, value", [("token_mask", 0.5), ("sample_mask", -1.0)])
def test_a_mask_that_is_not_0_and_1_is_an_error(key: str, value: float) -> None:
    logprobs, batch = data()
    batch[key] = torch.where(batch[key] == 1, value, batch[key])
    with pytest.raises(DataError, match=rf"^data\['{key}'\]: it holds {value:g}, and a mask holds 0 and 1"):
        own_loss(NO_KL)(logprobs, batch, *counts(batch))


def test_masks_of_any_dtype_train_the_same_numbers() -> None:
    logprobs, batch = data()
    want = value_and_gradient(own_loss(NO_KL), logprobs, batch, *counts(batch))
    for dtype in (torch.bool, torch.int64, torch.bfloat16):
        cast = batch | {name: batch[name].to(dtype) for name in ("token_mask", "sample_mask")}
        got = value_and_gradient(own_loss(NO_KL), logprobs, cast, *counts(batch))
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("key", ["logprobs", *(one for one in KEYS if one.endswith("logprobs"))])
def test_a_logprob_of_an_eighth_passes_and_a_larger_one_does_not(key: str) -> None:
    logprobs, batch = data()
    given = {**batch, "logprobs": wider(logprobs.detach())}
    for value in (0.125, 0.13):
        one = changed(given, key, value)
        call = own_loss(FULL), one.pop("logprobs")[:, 1:].requires_grad_(), one
        if value == 0.125:
            assert value_and_gradient(*call, *counts(batch))[1].isfinite().all()
            continue
        with pytest.raises(
            DataError, match="holds 0.13 at an unmasked token, .* or 0.125 where bfloat16 has rounded it"
        ):
            value_and_gradient(*call, *counts(batch))
