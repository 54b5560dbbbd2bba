"""slime's custom loss without slime: recorded numbers, cuts of the batch, and what is refused."""

import math
import sys
from argparse import Namespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from composer_plugins.adapters.slime_loss import loss_fn
from composer_plugins.adapters.slime_loss.loss import SlimeLoss, _losses
from composer_plugins.adapters.slime_loss.options import BY_ROLLOUT, parsed
from composer_plugins.errors import ComposerError, ComposerWarning, ConfigError, DataError
from composer_plugins.frameworks.contract import NamedLoss
from composer_plugins.frameworks.slime import ESTIMATOR, SLIME
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.choosing import find_one
from composer_plugins.losses.flags import Flags
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import golden, slime_doubles
from parity_tests.rigs.golden import Case, claim
from parity_tests.rigs.pasted import to_paste
from parity_tests.rigs.slime_doubles import args, batch, part, reducer

pytestmark = pytest.mark.filterwarnings("ignore:.*bounds the ratio of a sequence", "ignore:.*is reduced by")
POLICIES = ("grpo", "cispo", "gspo", "dppo_tv", "sapo", "opsm@slime", "reinforce")
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"}


@pytest.fixture(autouse=True)
def slime(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doubles of slime's modules, in the place of slime."""
    for name, module in slime_doubles.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def value_and_gradient(given: Namespace, own: Tensor, data: dict[str, Any]) -> list[Tensor]:
    """Of one micro-batch, as slime's dispatcher sums it."""
    loss, _ = loss_fn(given, data, own, reducer(data, given.calculate_per_token_loss))
    return [loss, torch.autograd.grad(loss, own)[0]]


def paste(**given: Any) -> tuple[list[str], Namespace]:
    """The arguments that are to be removed, and those without them and with the line that is to be pasted."""
    keys, line = to_paste(lambda: parsed(args(**given)))
    kept = {key: value for key, value in given.items() if key not in keys}
    return keys, args(**{**kept, "composer": {**given["composer"], **(yaml.safe_load(line) or {})}})


@claim("slime_policy")
def test_the_loss_equals_recorded_numbers(case: Case) -> None:
    """The arguments of the case are slime's own, and what the error says to paste has their meaning."""
    rows = [golden.tensor(row) for row in case["response_mask"]]
    old, advantages = golden.tensor(case["old_log_prob"]), golden.tensor(case["advantages"])
    data = {
        "unconcat_tokens": [torch.zeros(len(x) + 1) for x in rows],
        "total_lengths": [len(x) + 1 for x in rows],
        "response_lengths": [len(x) for x in rows],
        "loss_masks": rows,
        "rollout_mask_sums": torch.stack([x.sum() for x in rows]),
        "log_probs": list(old),
        "advantages": list(advantages.expand(old.shape)),
    }
    options = {**case["kwargs"], "calculate_per_token_loss": case["calculate_per_token_loss"]}
    options["composer"] = {"policy": "grpo@slime"}
    given = paste(**options)[1] if {*CLIPS} & {*options} else args(**options)
    logprobs = golden.tensor(case["log_prob"]).requires_grad_()
    loss, _ = loss_fn(given, data, logprobs.reshape(1, -1), reducer(data, given.calculate_per_token_loss))
    loss = loss if given.calculate_per_token_loss else loss / len(rows)  # the dispatcher's part of it
    (gradient,) = torch.autograd.grad(loss, logprobs)
    largest = max(1.0, float(golden.tensor(case["loss"]).abs()))
    assert_parity(loss, golden.tensor(case["loss"]), terms=old.numel(), magnitude=largest)
    want = golden.tensor(case["grad_log_prob"])
    assert_parity(gradient, want, terms=old.shape[-1], magnitude=max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("mode", [*BY_ROLLOUT, "token-mean"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_cut_into_micro_batches_leaves_the_gradient(policy: str, mode: str) -> None:
    """The dispatcher adds up micro-batches and ranks, and divides by what the whole step has."""
    composer = {"policy": policy, "mode": mode} | ({"max_length": 10.0} if mode.endswith("norm") else {})
    given = args(
        composer=composer, calculate_per_token_loss=mode == "token-mean", use_tis=policy != "dppo_tv", **KL
    )
    own, data = batch()
    whole = value_and_gradient(given, own, data)
    starts = [0, 5, 6, 12, 15]
    for cuts in ((0, 2, 4), (0, 1, 2, 3, 4)):
        pieces = []
        for a, b in zip(cuts, cuts[1:], strict=False):
            piece = own[:, starts[a] : starts[b]].detach().requires_grad_()
            pieces.append(value_and_gradient(given, piece, part(data, slice(a, b))))
        assert_parity(sum(one[0] for one in pieces), whole[0], terms=24, magnitude=10.0)
        assert_parity(torch.cat([one[1] for one in pieces], 1), whole[1], terms=24, what="gradient")


def test_modes_are_the_sums_that_their_names_say() -> None:
    own, data = batch()
    found = {}
    for mode in BY_ROLLOUT:
        composer = {"policy": "reinforce", "mode": mode} | (
            {"max_length": 10.0} if mode.endswith("norm") else {}
        )
        found[mode] = value_and_gradient(args(composer=composer), own, data)[0]
    by_row = [
        (-a * x * m).sum()
        for a, x, m in zip(data["advantages"], own[0].split([5, 1, 6, 3]), data["loss_masks"], strict=True)
    ]
    counts = data["rollout_mask_sums"].clamp(min=1)
    assert_parity(found["seq-mean-token-sum"], sum(by_row), terms=15)
    assert_parity(found["seq-mean-token-sum-norm"], sum(by_row) / 10, terms=15)
    assert_parity(
        found["seq-mean-token-mean"], sum(x / n for x, n in zip(by_row, counts, strict=True)), terms=15
    )


def test_nan_behind_the_mask_stays_behind_it() -> None:
    own, data = batch()
    given = args(use_tis=True, **KL)
    want = value_and_gradient(given, own, data)
    masks = [x.bool() for x in data["loss_masks"]]
    for name in ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages"):
        data[name] = [torch.where(m, x, torch.nan) for m, x in zip(masks, data[name], strict=True)]
    every = torch.cat(masks)
    # slime's reducer multiplies by the mask: a loss that is not 0 there would be NaN.
    got = value_and_gradient(given, torch.where(every, own.detach(), torch.nan).requires_grad_(), data)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


OPD = {"use_opd": True, "opd_type": "sglang", "opd_kl_coef": 0.0}


def hinted(**composer: Any) -> dict[str, Any]:
    """Arguments with a hint alone, of weight 0.5."""
    return {"composer": {"policy": "ppo", "policy_weight": 0.0, "hint_weight": 0.5, **composer}, **OPD}


IN_ADVANTAGES = hinted(hint_estimator="advantage", policy="reinforce", policy_weight=1.0)


def estimate(estimator: str, own: float, teacher: float) -> tuple[float, float]:
    """The estimate of a token and its slope in log pi, as docs/slime.md has them."""
    d = own - teacher
    return {
        "score": (d * own, d),
        "k2": (d**2 / 2, d),
        "k3": (math.exp(-d) + d - 1, 1 - math.exp(-d)),
    }[estimator]


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"])
@pytest.mark.parametrize(
    ("behaviour", "options"),
    [
        ("log_probs", {}),
        ("rollout_log_probs", {"use_tis": True}),
        ("rollout_log_probs", {"use_rollout_logprobs": True}),
    ],
)
@pytest.mark.parametrize("estimator", ["score", "k2", "k3"])
def test_a_hint_is_the_formula_of_its_page(
    estimator: str, behaviour: str, options: dict[str, Any], mode: str
) -> None:
    """In plain Python: hint_weight w h, with w = pi over the policy that the batch was sampled from."""
    own, data = batch()
    by_token = mode == "token-mean"
    given = args(**hinted(hint_estimator=estimator, mode=mode), **options, calculate_per_token_loss=by_token)
    value, gradient = value_and_gradient(given, own, data)
    total, slopes = 0.0, []
    for i, x in enumerate(own.detach()[0].split(data["response_lengths"])):
        count = max(float(data["loss_masks"][i].sum()), 1.0) if mode == "seq-mean-token-mean" else 1.0
        rows = (x, data["teacher_log_probs"][i], data[behaviour][i], data["loss_masks"][i])
        for pi, teacher, old, unmasked in zip(*(one.tolist() for one in rows), strict=True):
            h, slope = estimate(estimator, pi, teacher)
            weight = 0.5 * math.exp(pi - old) * unmasked / count
            total += weight * h
            slopes.append(weight * slope)
    assert_parity(value, torch.tensor(total, dtype=torch.float64), terms=15, magnitude=10.0)
    assert_parity(gradient, torch.tensor([slopes], dtype=torch.float64), terms=15, what="gradient")


def test_a_hint_in_the_advantages_is_the_teachers_gain() -> None:
    own, data = batch()
    _, gradient = value_and_gradient(args(**IN_ADVANTAGES), own, data)
    gain = torch.cat(data["teacher_log_probs"]) - own.detach()[0]
    want = reducer(data)(-(torch.cat(data["advantages"]) + 0.5 * gain) * own[0])
    assert_parity(gradient, torch.autograd.grad(want, own)[0], terms=4)


REWARDS = "rollout.on_policy_distillation.reward_func"


@pytest.mark.parametrize("options", [hinted(), IN_ADVANTAGES, OPD | {"policy": "opd"}])
@pytest.mark.parametrize("path", [None, f"slime.{REWARDS}", f"miles.{REWARDS}"])
def test_a_teacher_at_another_temperature_is_refused(options: dict[str, Any], path: str | None) -> None:
    """slime divides the policy's logits by rollout_temperature, and SGLang does not divide the teacher's."""
    options = {**options, "custom_rm_path": path}
    if (policy := options.pop("policy", None)) is not None:
        options["composer"] = {"policy": policy}
    parsed(args(**options))
    with pytest.raises(ConfigError, match="^rollout_temperature: it is 0.7, and SGLang .* --opd-type meg"):
        parsed(args(**options, rollout_temperature=0.7))
    parsed(args(**options | {"opd_type": "megatron"}, rollout_temperature=0.7))  # slime divides both
    with pytest.warns(ComposerWarning, match="rollout_temperature: it is 0.7"):
        parsed(args(**options | {"custom_rm_path": "mine.reward_func"}, rollout_temperature=0.7))


def test_a_temperature_is_free_where_no_term_reads_the_teacher() -> None:
    parsed(args(composer={"policy": "cispo"}, rollout_temperature=0.7, **OPD))


def test_the_terms_add_up_with_their_weights() -> None:
    own, data = batch()
    alone, both = (value_and_gradient(args(**options), own, data)[0] for options in ({}, KL))
    gap = own[0] - torch.cat(data["ref_log_probs"])
    assert_parity(both - alone, reducer(data)(0.1 * (torch.exp(-gap) - 1 + gap)), terms=15, magnitude=1.0)
    entropic = value_and_gradient(args(entropy_coef=0.01), own, data)[0]  # of the double: -log pi
    assert_parity(entropic - alone, reducer(data)(0.01 * own[0]), terms=15, magnitude=1.0)


def test_metrics_are_tensors_with_the_same_keys() -> None:
    own, data = batch()
    first, second = (loss_fn(args(**KL), data, own, reducer(data))[1] for _ in range(2))
    assert first.keys() == second.keys() >= {"loss", "composer/kl", "composer/policy_loss"}
    assert all(x.dim() == 0 and not x.requires_grad for x in first.values())
    torch.tensor([0, *first.values()])  # as slime's dispatcher packs them


def test_miles_calls_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    own, data = batch()
    want = value_and_gradient(args(**KL), own, data)
    for name, module in slime_doubles.miles_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    got = value_and_gradient(args(**KL), own, data)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_the_old_policy_is_this_one_where_slime_did_not_compute_it() -> None:
    own, data = batch()
    del data["log_probs"]
    (gradient,) = value_and_gradient(args(), own, data)[1:]
    want = reducer(data)(torch.cat(data["advantages"]).neg() * own[0])
    assert_parity(gradient, torch.autograd.grad(want, own)[0], terms=4)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a hint without a teacher": ({"composer": {"hint_weight": 0.1}}, "hint_weight", "no teacher"),
    "a hint twice": (
        {"composer": {"hint_weight": 0.1}, "use_opd": True, "opd_kl_coef": 1.0},
        "opd_kl_coef",
        "count twice",
    ),
    "a hint of logits": (
        {"composer": {"hint_weight": 0.1, "hint_divergence": "jsd"}, "use_opd": True, "opd_kl_coef": 0.0},
        "hint_divergence",
        "student_logits",
    ),
    "pairs": ({"composer": {"replay_weight": 0.1}}, "replay_weight", "no pairs"),
    "a mode of tokens": ({"composer": {"mode": "token-mean"}}, "mode", "no denominator"),
    "a mode of rollouts": (
        {"composer": {"mode": "seq-mean-token-mean"}, "calculate_per_token_loss": True},
        "mode",
        "no denominator",
    ),
    "no policy": (
        {"composer": {}},
        "policy",
        'it is not set; name a loss: policy: "grpo@slime" is slime\'s own',
    ),
    "no table": ({"composer": None}, "policy", "it is not set"),
    "two policies": (
        {"composer": {"policy": "sapo"}, "advantage_estimator": "cispo"},
        "advantage_estimator",
        "chooses 'cispo@slime'",
    ),
    "a reducer": (
        {"custom_pg_loss_reducer_function_path": "a.b"},
        "custom_pg_loss_reducer_function_path",
        "slime's own reducer",
    ),
    "a correction of the user's": (
        {"use_tis": True, "custom_tis_function_path": "a.b"},
        "custom_tis_function_path",
        "would drop it",
    ),
    "slime's correction of a ratio to the rollout": (
        {"use_tis": True, "composer": {"policy": "dppo_tv"}},
        "policy",
        "would be the second one; switch slime's off",
    ),
    "our correction of a ratio to the rollout engine": (
        {"use_rollout_logprobs": True, "composer": {"policy": "grpo", "rollout_correction": "tis"}},
        "policy",
        "would be the second one; remove rollout_correction",
    ),
    "options that are no table": ({"composer": "cispo"}, "composer", "write a table"),
    "a misspelt option": ({"composer": {"polcy": "cispo"}}, "polcy", "did you mean 'policy'"),
    "gspo with opsm": (
        {"composer": {"policy": "gspo"}, "advantage_estimator": "gspo", "use_opsm": True},
        "use_opsm",
        "chooses a loss that is not in the catalogue",
    ),
}


@pytest.mark.parametrize("given, key, problem", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_delivered_is_refused(given: dict[str, Any], key: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(args(**given))
    found = [error.value, *error.value.others]
    assert key in [one.key.removeprefix("composer.") for one in found], [str(one) for one in found]
    assert any(problem in str(one) for one in found), [str(one) for one in found]


CLIPS: dict[str, tuple[float, tuple[str, ...]]] = {
    "eps_clip": (0.01, ("clip_low", "clip_high")),
    "eps_clip_high": (0.9, ("clip_high",)),
    "eps_clip_c": (1.2, ("dual_clip",)),
    "opsm_delta": (0.5, ("threshold",)),
}
OWN = [
    (named, {key: value}, dict.fromkeys(names, value))
    for named in SLIME.losses
    if named.kind == "policy" and named.options[ESTIMATOR] in ("grpo", "gspo", "cispo")
    for key, (value, names) in CLIPS.items()
]


@pytest.mark.parametrize("named, clip, params", OWN)
def test_a_pasted_line_trains_what_slimes_argument_says(
    named: NamedLoss, clip: dict[str, float], params: dict[str, float]
) -> None:
    """The argument beside slime's own loss is that parameter: `conform slime` and recorded numbers say so."""
    own, data = batch()
    gaps = (0.4, -0.1, 0.1, 0.4)  # ratios of 1.5, 0.9 and 1.1
    parts = own.detach()[0].split(data["response_lengths"])
    data["log_probs"] = [(x - gap).clamp(max=-1e-3) for x, gap in zip(parts, gaps, strict=True)]
    data["advantages"] = [x.abs() * sign for x, sign in zip(data["advantages"], (1, -1, 1, -1), strict=True)]
    composer, chosen = {"policy": named.row}, dict(named.options)
    keys, pasted = paste(composer=composer, **chosen, **clip)
    has_it = {*params} <= {*find_one(named.row, "policy").loss.parameters}
    wanted = args(composer={**composer, "policy_params": params if has_it else {}}, **chosen)
    ours, want, plain = (
        value_and_gradient(one, own, data) for one in (pasted, wanted, args(composer=composer, **chosen))
    )
    assert keys == [*clip]
    assert torch.equal(ours[0], want[0]) and torch.equal(ours[1], want[1])
    assert torch.equal(want[1], plain[1]) != has_it


def test_slimes_copy_of_eps_clip_is_not_an_option_of_the_user() -> None:
    """slime sets eps_clip_high to eps_clip where the user has not set it."""
    keys, pasted = paste(composer={"policy": "dapo"}, eps_clip=0.1)
    assert keys == ["eps_clip"]
    assert pasted.composer["policy_params"] == {"clip_low": 0.1, "clip_high": 0.1}
    keys, pasted = paste(composer={"policy": "dapo"}, eps_clip=0.1, eps_clip_high=0.3)
    assert keys == ["eps_clip", "eps_clip_high"]
    assert pasted.composer["policy_params"] == {"clip_low": 0.1, "clip_high": 0.3}


def test_the_log_says_what_trains_where_a_default_is_typed(caplog: pytest.LogCaptureFixture) -> None:
    own, data = batch()
    keys, given = paste(composer={"policy": "gspo"}, eps_clip=0.2, eps_clip_high=0.28)
    _losses.clear()
    for _ in range(2):
        value_and_gradient(given, own, data)
    assert keys == ["eps_clip_high"]
    assert caplog.messages == [
        "policy gspo(clip_low=0.0003, clip_high=0.28), seq-mean-token-mean; slime's options for the "
        "parameters of its own policy losses are not read"
    ]


@pytest.mark.parametrize("key, option", [("ref_log_probs", KL), ("rollout_log_probs", {"use_tis": True})])
def test_a_batch_without_what_the_loss_needs_is_one_error(key: str, option: dict[str, Any]) -> None:
    own, data = batch()
    del data[key]
    with pytest.raises(DataError, match=key):
        value_and_gradient(args(**option), own, data)


def summed(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """A loss with one number for the whole batch."""
    return TokenLoss((-advantages * logprobs * mask).sum(), {})


def junk_behind_the_mask(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """A loss that is not 0 where the mask is False."""
    return TokenLoss(-advantages * logprobs, {})


def test_a_users_loss_is_masked_before_slime_multiplies_by_the_mask() -> None:
    own, data = batch()
    want = value_and_gradient(args(composer={"policy": "reinforce"}), own, data)
    every = torch.cat([x.bool() for x in data["loss_masks"]])
    dirty = torch.where(every, own.detach(), torch.nan).requires_grad_()
    got = value_and_gradient(args(composer={"policy": f"{__name__}:junk_behind_the_mask"}), dirty, data)
    assert torch.equal(got[0], want[0]) and torch.equal(torch.where(every, got[1], 0.0), want[1])


def test_wrong_result_types_of_a_users_loss_are_refused() -> None:
    own, data = batch()
    with pytest.raises(ComposerError, match="returned the shape"):
        value_and_gradient(args(composer={"policy": f"{__name__}:summed"}), own, data)


# Batches that are wrong


def with_value(data: dict[str, Any], key: str, value: float) -> dict[str, Any]:
    """The batch with this number at an unmasked token of its third response."""
    parts = [x.clone() for x in data[key]]
    parts[2][1] = value
    return data | {key: parts}


EVERY = {**hinted(policy_weight=1.0), "use_tis": True, **KL}
NAMES = {
    "advantages": "advantages",
    "log_probs": "old_logprobs",
    "rollout_log_probs": "rollout_logprobs",
    "ref_log_probs": "ref_logprobs",
    "teacher_log_probs": "teacher_logprobs",
}


@pytest.mark.parametrize("key", NAMES)
def test_a_loss_that_is_not_finite_names_its_input(key: str) -> None:
    own, data = batch()
    value_and_gradient(args(**EVERY), own, data)
    words = (
        f"^policy 'ppo': the loss is not finite, because {NAMES[key]} is not finite at an unmasked token; "
    )
    with pytest.raises(DataError, match=words):
        value_and_gradient(args(**EVERY), own, with_value(data, key, torch.nan))


def test_later_calls_do_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of the device "meta" has no numbers, so a look at one of them is an error."""
    own, data = batch()
    value_and_gradient(args(**EVERY), own, data)
    monkeypatch.setattr(Flags, "read", lambda self, flags: [])
    there = {
        name: [one.to("meta") if isinstance(one, Tensor) else one for one in x] for name, x in data.items()
    }
    value_and_gradient(args(**EVERY), own.detach().to("meta").requires_grad_(), there)


def test_a_mask_that_is_not_0_and_1_is_an_error() -> None:
    own, data = batch()
    given = args()
    with pytest.raises(DataError, match=r"^batch\['loss_masks'\]: it holds 0.5, and a mask holds 0 and 1; "):
        loss_of_its_own(given)(given, with_value(data, "loss_masks", 0.5), own, reducer(data))


def loss_of_its_own(given: Namespace) -> SlimeLoss:
    """A loss that has not been called, which checks its first batch."""
    return SlimeLoss(parsed(given))


@pytest.mark.parametrize("key", NAMES)
def test_a_stream_of_other_lengths_is_an_error_with_both(key: str) -> None:
    """The whole response, where the rank has a part of it; and the other way around."""
    own, data = batch()
    first = "response 2 has {} values, and this rank has 6 of its 6 tokens; pass one value per token of this"
    for parts, length in ((torch.zeros(3), 3), (torch.zeros(12), 12)):
        streams = [*data[key][:2], parts, data[key][3]]
        with pytest.raises(DataError, match=rf"^batch\['{key}'\]: {first.format(length)}"):
            value_and_gradient(args(**EVERY), own, data | {key: streams})


def test_a_batch_without_one_response_or_token_is_an_error() -> None:
    own, data = batch()
    with pytest.raises(
        DataError, match=r"^batch\['advantages'\]: it has 3 responses, and the batch 4; pass one"
    ):
        value_and_gradient(args(), own, data | {"advantages": data["advantages"][:3]})
    masks = [*data["loss_masks"][:2], torch.ones(1), data["loss_masks"][3]]
    with pytest.raises(
        DataError, match=r"^batch\['loss_masks'\]: response 2 has 1 values, and 6 tokens; pass"
    ):
        value_and_gradient(args(), own, data | {"loss_masks": masks})


def test_whole_streams_under_context_parallelism_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    own, data = batch()
    module = sys.modules[f"{slime_doubles.PACKAGE}.loss"]
    halves = [x[: (len(x) + 1) // 2] for x in own[0].split(data["response_lengths"])]
    monkeypatch.setattr(module, "get_log_probs_and_entropy", lambda *_, **__: (None, {"log_probs": halves}))
    with pytest.raises(
        DataError,
        match=r"batch\['advantages'\]: response 0 has 5 values, and this rank has 3 of its 5 tokens",
    ):
        value_and_gradient(args(), own, data)


@pytest.mark.parametrize("options", [EVERY, IN_ADVANTAGES], ids=["score", "advantage"])
def test_a_logprob_of_an_eighth_passes_and_a_larger_one_does_not(options: dict[str, Any]) -> None:
    own, data = batch()
    keys = {"log_probs", "rollout_log_probs", "ref_log_probs"} if options is EVERY else set()
    for key in sorted(keys | {"teacher_log_probs"}):
        given = args(**options)
        loss = loss_of_its_own(given)(given, with_value(data, key, 0.125), own, reducer(data))[0]
        assert torch.autograd.grad(loss, own)[0].isfinite().all()
        with pytest.raises(
            DataError, match="holds 0.13 at an unmasked token, .* or 0.125 where bfloat16 has rounded it"
        ):
            loss_of_its_own(given)(given, with_value(data, key, 0.13), own, reducer(data))
