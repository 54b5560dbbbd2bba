"""The hint and replay losses without logits: equal to those from the model's logits, in the real trainer."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    Qwen3ForCausalLM,
)

from composer_plugins.adapters.trl_mixin import forward
from parity_tests.rigs import tiny

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "initializer_range": 0.5}
SIZES |= {"num_attention_heads": 2, "vocab_size": len(tiny.SYMBOLS), "max_position_embeddings": 32}
SIZES |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
HEADS = {"num_key_value_heads": 1}
FAMILIES = {
    "llama": LlamaConfig(**SIZES, **HEADS),
    "softcap": Gemma2Config(**SIZES, **HEADS, head_dim=8, final_logit_softcapping=2.0),
    "logit_scale": CohereConfig(**SIZES, **HEADS, logit_scale=0.25),
    "logits_scaling": GraniteConfig(**SIZES, **HEADS, logits_scaling=3.0),
    "bias": PhiConfig(**SIZES, num_key_value_heads=2),
    "no logits_to_keep": GPTNeoXConfig(**SIZES),
}
LOSSES: dict[str, dict[str, Any]] = {
    "jsd": {"hint_params": {"beta": 0.3, "temperature": 1.5}},
    "forward_kl": {"hint_divergence": "forward_kl"},
    "reverse_kl": {"hint_divergence": "reverse_kl"},
    "sampled_token": {"hint_divergence": "sampled_token"},
    "cross-entropy": {"hint_divergence": "forward_kl", "hint_params": {"value": "cross-entropy"}},
    "entry_clip": {"hint_params": {"entry_clip": 0.05}},
    "top_k": {"hint_params": {"top_k": 3, "rest": "tail"}},
    "top_k of the student": {"hint_params": {"top_k": 4, "top_k_of": "student", "rest": "tail"}},
    "sdpo": {"hint_divergence": "sdpo@sdpo", "hint_params": {"top_k": 3}},
    "taid": {"hint_divergence": "taid", "hint_params": {"t": 0.5}},
    "entropy_gated_kl": {"hint_divergence": "entropy_gated_kl", "hint_params": {"min_entropy": 0.5}},
}
# Sums of at most a few hundred terms in float64, in another order.
FLOAT64, FLOAT32 = 1e-12, 1e-5


def of_family(name: str) -> Any:
    """A model of the family with random weights and biases."""
    torch.manual_seed(0)
    # In float64 the mask of Gemma's attention overflows its softmax, which is float32, where a row is padded.
    dtype = torch.float32 if name == "softcap" else torch.float64
    model = AutoModelForCausalLM.from_config(FAMILIES[name]).to(dtype)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def untied() -> Qwen3ForCausalLM:
    """`tiny.model` with a head of its own."""
    config = tiny.model().config
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).double()


def assert_equal(made: Any, tolerance: float = FLOAT64) -> None:
    """The same loss, gradient and metrics of one batch without logits and with them."""
    assert made._data_channels and all(channel.fused_linear for channel in made._data_channels)
    inputs = tiny.batch(made)
    torch.manual_seed(1)
    inputs["old_per_token_logps"] = -3 * torch.rand(inputs["completion_ids"].shape)  # for the ratio of sdpo
    results, metrics = [], []
    for fused_linear in (True, False):
        for channel in made._data_channels:
            channel.fused_linear = fused_linear
        made._metrics["train"].clear()
        results.append(tiny.loss_and_gradient(made, inputs))
        ours = {name: value for name, value in made._metrics["train"].items() if "composer/" in name}
        metrics.append({name: float(values[-1]) for name, values in ours.items()})
    ((loss, gradient), (expected, by_logits)), (found, wanted) = results, metrics
    assert expected != 0
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    assert tiny.relative_difference(by_logits, gradient) <= tolerance
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted, rel=max(tolerance, 1e-6))  # logged as float32


def hint(**options: Any) -> Any:
    """A trainer of the hint channel alone, whose policy is no longer its teacher."""
    options = {"policy_weight": 0.0, "hint_weight": 1.0, "dtype": torch.float64, "max_steps": 1, **options}
    made = tiny.trainer(**options)
    made.train()
    return made


@pytest.mark.parametrize("loss", LOSSES)
def test_every_divergence(loss: str) -> None:
    assert_equal(hint(**LOSSES[loss], temperature=0.7))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_models(family: str) -> None:
    made = hint(policy_model=of_family(family), replay_weight=1.0)
    assert_equal(made, FLOAT64 if made.model.dtype == torch.float64 else FLOAT32)


@pytest.mark.parametrize("teacher", ["base", "ema", "live"])
def test_every_teacher(teacher: str) -> None:
    assert_equal(hint(policy_model=untied(), hint_teacher=teacher))


@pytest.mark.parametrize("divergence", ["jsd", "sampled_token"])
def test_absolute_positions(divergence: str) -> None:
    assert_equal(hint(policy_model=tiny.absolute_model(), hint_divergence=divergence, replay_weight=1.0))


def test_the_weight_and_the_bias_of_the_head_are_used_in_every_output() -> None:
    """DDP looks for parameters that an output does not use, and fails where they get a gradient later."""
    head, hidden = torch.nn.Linear(4, 6), torch.randn(2, 3, 4, requires_grad=True)
    with forward.head_keeps_input(head):
        column = head(hidden)
    column.sum().backward()
    assert column.shape == (2, 3, 1) and torch.equal(column, hidden[..., :1])
    for parameter in head.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


@pytest.mark.parametrize("teacher", ["base", "ema"])
def test_lora(teacher: str) -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    options = {"hint_teacher": teacher, "replay_weight": 1.0, "arguments": {"peft_config": adapter}}
    made = hint(**options)
    assert not made.model.get_output_embeddings().weight.requires_grad
    assert_equal(made, tolerance=1e-6)  # the weights of the adapter are float32


@pytest.mark.parametrize("loss", ["dpo", "simpo"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_replay(loss: str, temperature: float) -> None:
    options = {"replay_weight": 1.0, "replay_loss": loss, "replay_temperature": temperature}
    made = tiny.trainer(policy_weight=0.0, dtype=torch.float64, **options)
    made.train()
    assert_equal(made)


@pytest.mark.parametrize("loss", ["jsd", "taid"])
def test_gradient_checkpointing(loss: str) -> None:
    """The layers run again in the backward; the head, whose forward pass is changed, does not."""
    assert_equal(hint(**LOSSES[loss], gradient_checkpointing=True, replay_weight=1.0))


def test_autocast() -> None:
    """Weights in float32 and products of bfloat16, as in most runs."""
    made = hint(dtype=torch.float32, bf16=True, replay_weight=1.0, policy="grpo", policy_weight=1.0)
    assert made.accelerator.mixed_precision == "bf16"
    assert_equal(made, tolerance=4 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_option_chooses_the_path_and_training_is_the_same(accumulation: int) -> None:
    """All three channels, three optimizer steps."""
    options = {"policy": "grpo", "hint_weight": 0.7, "replay_weight": 0.3, "dtype": torch.float64}
    options |= {"gradient_accumulation_steps": accumulation, "max_steps": 3, "num_iterations": 2}
    options |= {"per_device_train_batch_size": 16 // accumulation}
    fused, logits = (tiny.trainer(fused_linear=given, **options) for given in (True, False))
    assert [channel.fused_linear for channel in logits._data_channels] == [False, False]
    ours, expected = tiny.gradients(fused), tiny.gradients(logits)
    assert len(ours) == 3
    assert max(map(tiny.relative_difference, expected, ours)) <= 1e-6  # TRL's fused head computes in float32


def test_rows_without_a_hint_or_a_pair_have_a_gradient_of_zero() -> None:
    """Not none, which DDP would wait for."""
    made = hint(replay_weight=1.0)
    inputs = tiny.batch(made)
    inputs["hint_mask"][:] = False
    inputs["replay_weight"][:] = 0.0
    for loss in ("jsd", "taid"):
        made._hint.choice = hint(**LOSSES[loss])._hint.choice
        value, gradient = tiny.loss_and_gradient(made, inputs)
        assert value == 0 and not gradient.any()
        assert all(p.grad is not None for p in made.model.parameters())


class Rows(TorchDispatchMode):
    """The most rows of any tensor with an entry for each token of the vocabulary that is made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            vocab = isinstance(x, Tensor) and x.dim() and x.shape[-1] == len(tiny.SYMBOLS)
            if vocab and x.is_contiguous():  # the transpose of a weight is not
                self.most = max(self.most, x.numel() // len(tiny.SYMBOLS))
        return result


@pytest.mark.parametrize("loss", ["jsd", "sampled_token", "sdpo", "taid", "replay"])
def test_no_tensor_has_the_logits_of_more_than_a_tile(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight tokens, and as many of the teacher. The batch has 80."""
    options = {"hint_weight": 0.0, "replay_weight": 1.0} if loss == "replay" else LOSSES[loss]
    made = hint(**options)
    inputs = tiny.batch(made)
    for name, rows in (("CPU_TILE", 2), ("CPU_PRODUCT", 8), ("CPU_PART", 2)):
        monkeypatch.setattr(f"composer_plugins.kernels.linear.tiles.{name}", rows * len(tiny.SYMBOLS))
    (channel,) = made._data_channels
    logprobs = torch.zeros(inputs["completion_ids"].shape, requires_grad=True)
    arguments = () if loss == "replay" else (logprobs,)
    most = []
    for channel.fused_linear in (True, False):
        with Rows() as seen:
            channel.loss(made, made.model, inputs, *arguments).backward()
        most.append(seen.most)
    assert most[0] <= 16 < most[1]


def with_logits(change: Callable[[Tensor], Tensor]) -> type[Qwen3ForCausalLM]:
    """A model whose logits are not those of its head, which its config does not say."""

    class Odd(Qwen3ForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = change(output.logits)
            return output

    return Odd


class Twice(Qwen3ForCausalLM):
    """It calls its head twice."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        super().forward(*args, **kwargs)
        return super().forward(*args, **kwargs)


class Head(torch.nn.Linear):
    """A head of another type."""


KINDS = {
    "shifted": with_logits(lambda x: x - 0.25 * (torch.arange(x.shape[-1]) == 5)),
    "scaled": with_logits(lambda x: x * 0.9),
    "capped": with_logits(lambda x: 15 * torch.tanh(x / 15)),  # the largest is 5
    "masked": with_logits(lambda x: x.masked_fill(torch.arange(x.shape[-1]) == 26, -torch.inf)),
    "reshaped": with_logits(lambda x: x.view(*x.shape[:2], len(tiny.SYMBOLS))),  # it relies on their size
    "twice": Twice,
}
REASONS = {
    **dict.fromkeys(
        ("shifted", "scaled", "capped", "masked"), "its logits are not the output of its output head"
    ),
    "twice": "its forward pass cannot do without the logits .model: .* calls the output head 2 times",
    "reshaped": "its forward pass cannot do without the logits .shape",
    "head": "its output head is a .*test_fused_linear.Head, not a torch.nn.Linear",
    "replaced": "another library has replaced the forward pass or the weight of its output head",
    "hooked": "its output head has hooks",
    "compiled": "torch_compile compiles the model",
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize(
    ("odd", "dtype"),
    [*((odd, torch.float32) for odd in REASONS), *((odd, torch.bfloat16) for odd in list(REASONS)[:3])],
)
def test_a_model_whose_logits_are_not_those_of_its_head_falls_back_and_the_log_says_why(
    odd: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.model(dtype)
    model.__class__ = KINDS.get(odd, Qwen3ForCausalLM)
    if odd == "head":
        model.lm_head.__class__ = Head
    if odd == "replaced":
        model.lm_head.forward = model.lm_head.forward  # as Accelerate does with device_map
    if odd == "hooked":
        model.lm_head.register_full_backward_hook(lambda module, given, got: None)
    made = tiny.trainer(policy_model=model, torch_compile=odd == "compiled", hint_weight=1.0)
    assert re.search(rf"; hint from logits \({REASONS[odd]}.*\); processes", caplog.text)
    assert not made._hint.fused_linear
    if odd != "compiled":
        assert made._compute_loss(made.model, tiny.batch(made)).isfinite()


def test_the_log_says_which_channel_needs_logits(caplog: pytest.LogCaptureFixture) -> None:
    tiny.trainer(
        hint_weight=1.0, hint_divergence="composer_plugins.kernels.divergences:tv", replay_weight=1.0
    )
    tiny.trainer(replay_weight=1.0, fused_linear=False)
    first, second = (one.getMessage() for one in caplog.records if "composer loss" in one.getMessage())
    assert first.endswith("; hint without logits; replay without logits; processes: 1 (NO)")
    assert second.endswith("; replay from logits (fused_linear is False); processes: 1 (NO)")


def test_a_second_trainer_of_one_model_has_a_teacher_of_its_own() -> None:
    """The first one has replaced the model's forward by a function that calls the original model."""
    model = tiny.model(torch.float64)
    tiny.trainer(policy_model=model)
    made = hint(policy_model=model, replay_weight=1.0)
    teacher, policy = made._hint.teacher.model, made.model
    ids = torch.tensor([[5, 6, 7]])
    assert not torch.equal(teacher(ids).logits, policy(ids).logits)
    assert_equal(made)


def test_the_head_is_itself_again_after_an_error() -> None:
    made = hint()
    head = made.model.get_output_embeddings()
    inputs = tiny.batch(made)
    inputs["prompt_ids"] = inputs["prompt_ids"] + 10_000
    with pytest.raises(IndexError):
        made._hint.loss(made, made.model, inputs, torch.zeros(inputs["completion_ids"].shape))
    assert "forward" not in vars(head)
