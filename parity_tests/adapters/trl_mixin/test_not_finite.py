"""A loss or a metric of a channel that is not finite ends the run, before the policy's weights follow it."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from composer_plugins.errors import DataError
from composer_plugins.kernels.policy import grpo
from composer_plugins.kernels.types import Metric, TokenLoss
from parity_tests.rigs import tiny

TEACHER = "look for weights that are not finite in the teacher of this run"
POLICY = "lower learning_rate or set max_grad_norm"


def overflowing(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """A loss that is finite, with a metric that is not."""
    token = grpo(logprobs, old_logprobs, advantages, mask)
    return TokenLoss(token.loss, {"size": Metric(torch.full_like(token.loss, torch.inf), mask)})


def kinked(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """A loss that is finite, with a gradient that is not: the derivative of a root at 0."""
    token = grpo(logprobs, old_logprobs, advantages, mask)
    root = torch.where(mask, logprobs - old_logprobs, 0.0).abs().sqrt()
    return TokenLoss(token.loss + root, token.metrics)


def assert_ends(made: Any, words: str, *, poisoned: bool = False) -> None:
    """The run ends with this error, and the policy, unless it is `poisoned`, has the weights from before."""
    before = {name: weight.clone() for name, weight in made.model.named_parameters()}
    with pytest.raises(DataError, match=words):
        made.train()
    assert poisoned or all(weight.equal(before[name]) for name, weight in made.model.named_parameters())


MODELS = ("_hint.teacher.model", "_replay.reference.model", "model")
teacher, reference, policy = map(attrgetter, MODELS)
NAN = "the {} channel, step 1: its loss is nan, because .* values of {} are not finite, the first .*; {}"
HINT, SIMPO = {"hint_weight": 1.0}, {"replay_weight": 1.0, "replay_loss": "simpo"}
SIZE = "the policy channel, step 1: its metric 'size' is inf, and all its inputs are finite, so it o"


@pytest.mark.parametrize(
    ("options", "poisoned", "message"),
    [
        (HINT, teacher, NAN.format("hint", "teacher_logprobs", TEACHER)),
        ({**HINT, "fused_linear": False}, teacher, NAN.format("hint", "teacher_logprobs", TEACHER)),
        (
            {**HINT, "hint_divergence": "sampled_token"},
            teacher,
            NAN.format("hint", "teacher_logprobs", TEACHER),
        ),
        ({"replay_weight": 1.0}, reference, NAN.format("replay", "ref_chosen", ".* the reference")),
        ({"policy": "grpo"}, policy, NAN.format("policy", "logprobs", POLICY)),
        (SIMPO, policy, NAN.format("replay", "chosen", POLICY)),
        (SIMPO | {"replay_loss": "sft"}, policy, NAN.format("replay", "chosen_nll", POLICY)),
        ({"policy": f"{__name__}:overflowing"}, None, SIZE),
    ],
    ids=("hint", "hint from logits", "hint, sampled token", "reference", "policy", "simpo", "sft", "metric"),
)
def test_a_run_ends_with_channel_step_and_input(options: dict[str, Any], poisoned: Any, message: str) -> None:
    made = tiny.trainer(**options)
    if poisoned is not None:
        poisoned(made).lm_head.weight.data[4, 0] = torch.nan
    assert_ends(made, message, poisoned=poisoned is policy)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("advantages", -torch.inf, r"of advantages .* \(-inf\) at row 3, token 0; look at the rewards"),
        ("old_per_token_logps", torch.nan, rf"of old_logprobs .* \(nan\) at row 3, token 0; {POLICY}"),
    ],
)
def test_an_input_that_is_not_finite_is_named_in_its_step(name: str, value: float, words: str) -> None:
    made = tiny.trainer(policy="gspo", max_steps=2, num_iterations=2)
    made.train()
    inputs = tiny.batch(made)
    inputs[name][3] = value
    with pytest.raises(DataError, match=rf"step 3: its loss is -?(nan|inf), because .* {words}"):
        made._compute_loss(made.model, inputs)


def test_a_masked_value_that_is_not_finite_is_no_error() -> None:
    made = tiny.trainer(policy="grpo")
    inputs = tiny.batch(made)
    inputs["advantages"][3] = torch.nan
    inputs["completion_mask"][3] = 0
    assert made._compute_loss(made.model, inputs).isfinite()


def test_a_process_whose_inputs_are_finite_raises_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it waits for them: the sums are those of all processes."""
    made = tiny.trainer(policy="grpo")
    inputs = tiny.batch(made)
    monkeypatch.setattr(Accelerator, "reduce", lambda _, sums, reduction: sums * torch.nan)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(
        DataError, match="inputs on this process are finite; read the error of the other proc"
    ):
        made._compute_loss(made.model, inputs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that TRL loads its reference from."""
    made: Path = tmp_path_factory.mktemp("model")
    tiny.model().save_pretrained(made)
    return made


def far_from_its_reference(made: Any) -> None:
    """The reference is more than 88 nats above the policy at some tokens, so that TRL's KL overflows."""
    made.model.model.norm.weight.data *= 100


def without_reference(made: Any) -> None:
    made.ref_model.lm_head.weight.data[4, 0] = torch.nan


KL = r"values of KL are not finite, the first \(inf\) at row \d+, token \d+; look for weights of the"
REF = r"values of ref_logprobs are not finite, the first \(nan\) at .*; look for weights that are not"


@pytest.mark.parametrize("change", [far_from_its_reference, without_reference])
@pytest.mark.parametrize("options", [{"policy": "grpo"}, SIMPO], ids=["a policy of ours", "replay"])
def test_a_term_of_trl_ends_the_run_in_time(change: Any, options: dict[str, Any], folder: Path) -> None:
    made = tiny.trainer(policy_model=str(folder), beta=0.04, max_grad_norm=1.0, **options)
    change(made)
    problem = KL if change is far_from_its_reference else REF
    words = rf"^TRL's own loss, step 1: with it the whole loss is (inf|nan), because \d+ of \d+ {problem}"
    assert_ends(made, words)


def test_a_kl_at_a_masked_token_is_named_too(folder: Path) -> None:
    """TRL multiplies its KL by the mask, and 0 times infinity is NaN."""
    made = tiny.trainer(policy_model=str(folder), beta=0.04, policy="grpo")
    inputs = tiny.batch(made)
    inputs["completion_mask"][2, 0] = 0
    inputs["ref_per_token_logps"][2, 0] += 200
    with pytest.raises(DataError, match=r"whole loss is nan, because 1 of .* of KL .* at row 2, token 0"):
        made._compute_loss(made.model, inputs)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_ends_the_run_before_the_step(max_grad_norm: float) -> None:
    made = tiny.trainer(policy=f"{__name__}:kinked", max_grad_norm=max_grad_norm)
    assert_ends(made, "^the gradient, step 1: its norm is nan, and the loss is finite; look for an operation")


def test_a_norm_that_overflows_alone_is_no_error() -> None:
    """Its square is beyond float32. Clipping makes the gradient 0, and the run goes on as TRL's does."""
    made = tiny.trainer(policy="grpo", num_iterations=2, steps_per_generation=1, max_grad_norm=1.0)
    inner = made._compute_loss

    def far(model: Any, inputs: dict[str, Any]) -> Any:
        old, advantages = inputs["old_per_token_logps"].clone(), inputs["advantages"].clone()
        old[0, 0] -= 50
        advantages[0] = -1
        return inner(model, {**inputs, "old_per_token_logps": old, "advantages": advantages})

    made._compute_loss = far
    assert tiny.logged(made, "grad_norm") == [torch.inf]
    assert all(weight.isfinite().all() for weight in made.model.parameters())


def test_a_loss_whose_channels_are_switched_off_is_trls_alone() -> None:
    made = tiny.trainer(policy="trl", hint_weight=1.0)
    inner = made._compute_loss

    def without_hint(model: Any, inputs: dict[str, Any]) -> Any:
        made.args.hint_weight = 0.0
        inputs["advantages"][0] = torch.nan
        return inner(model, inputs)

    made._compute_loss = without_hint
    made.train()
    assert made.state.global_step == 1


def test_an_error_of_an_evaluation_says_so() -> None:
    made = tiny.trainer(policy="grpo")
    inputs = tiny.batch(made)
    inputs["advantages"][0] = torch.nan
    made.model.eval()
    with pytest.raises(DataError, match="^the policy channel, evaluation after step 0: its loss is nan"):
        made._compute_loss(made.model, inputs)


def test_a_gradient_whose_step_is_skipped_is_no_error() -> None:
    """As a scaler of float16 does."""
    made = tiny.trainer(policy=f"{__name__}:kinked", max_grad_norm=1.0)
    made.accelerator.scaler = torch.amp.GradScaler("cpu")
    before = {name: weight.clone() for name, weight in made.model.named_parameters()}
    made.train()
    assert made.state.global_step == 1
    assert all(weight.equal(before[name]) for name, weight in made.model.named_parameters())


def test_the_norm_of_a_gradient_is_logged_as_trl_does() -> None:
    ours, trls = (tiny.logged(tiny.trainer(policy=x, loss_type="grpo"), "grad_norm") for x in ("grpo", "trl"))
    assert ours == pytest.approx(trls, rel=1e-5)
