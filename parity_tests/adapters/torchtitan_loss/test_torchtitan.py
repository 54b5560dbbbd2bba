"""Our loss with torchtitan itself: its GRPO and DAPO, its chunks, its command line. Session `torchtitan`."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import Configurable

from composer_plugins.conformance.torchtitan_claims import upstream
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.torchtitan_doubles import make, packed, run, valid_tokens


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("theirs", "options", "policy"),
    [
        ("GRPOLoss", {}, "grpo@torchtitan"),
        ("GRPOLoss", {"clip_eps": 0.1}, "grpo@torchtitan"),
        ("DAPOLoss", {}, "dapo@torchtitan"),
        ("DAPOLoss", {"ratio_clip_low": 0.1, "ratio_clip_high": 0.28}, "dapo@torchtitan"),
    ],
)
def test_its_own_losses_through_ours(
    loss_module: Any, theirs: str, options: dict[str, float], policy: str, seed: int
) -> None:
    """The value and the gradient, and the metrics that both log, in float32 on both sides: exactly."""
    batch, params = packed(seed), upstream.our_params(policy, options)
    tokens = valid_tokens(batch)
    wanted = run(upstream.loss_class(theirs).Config(**options).build(), batch, tokens)
    found = run(make(loss_module, policy=policy, policy_params=params), batch, tokens)
    assert torch.equal(found[1], wanted[1])
    assert_parity(found[0], wanted[0], terms=40, magnitude=1.0, dtype=torch.float32)
    shared = found[2].keys() & wanted[2].keys()
    assert len(shared) == 5
    for name in shared:
        assert_parity(
            found[2][name], wanted[2][name], terms=40, magnitude=10.0, dtype=torch.float32, what=name
        )


def test_in_chunks_the_gradient_of_the_hidden_states_is_the_same(loss_module: Any) -> None:
    batch, g = packed(), torch.Generator().manual_seed(1)
    hidden, head = torch.randn(4, 12, 5, generator=g), torch.nn.Linear(5, 7, bias=False)
    rest = {name: x for name, x in batch.items() if name not in ("logits", "labels")}
    found = []
    for chunks in (1, 4):
        config = ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=loss_module.ComposerLoss.Config())
        wrapper, leaf = config.build(), hidden.clone().requires_grad_()
        wrapper.set_lm_head(head)
        head.zero_grad()
        loss, metrics = wrapper(leaf, batch["labels"], 21, **rest)
        loss.backward()
        assert leaf.grad is not None and head.weight.grad is not None
        found.append(
            (loss.detach(), leaf.grad, head.weight.grad.clone(), metrics["composer/clip_frac_high/mean"])
        )
    for a, b in zip(*found, strict=True):
        assert_parity(a, b, terms=40, magnitude=1.0, dtype=torch.float32)


def test_its_command_line_reaches_the_config(loss_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--trainer.loss.policy cispo`, by tyro, as torchtitan's ConfigManager parses it."""
    import tyro
    from torchtitan.config.manager import custom_registry

    @dataclass(kw_only=True, slots=True)
    class Trainer(Configurable.Config):
        loss: loss_module.ComposerLoss.Config = field(default_factory=loss_module.ComposerLoss.Config)  # type: ignore[name-defined]

    words = ["--loss.policy", "cispo", "--loss.policy-weight", "0.5"]
    parsed = tyro.cli(Trainer, args=words, default=Trainer(), registry=custom_registry)
    assert parsed.loss.policy == "cispo" and parsed.loss.policy_weight == 0.5


def test_its_trainer_takes_it_where_it_takes_its_own(loss_module: Any) -> None:
    """`PolicyTrainer.Config.loss` is annotated BaseLoss.Config, and is built without arguments."""
    from torchtitan.components.loss import BaseLoss

    assert issubclass(loss_module.ComposerLoss, BaseLoss)
    assert isinstance(loss_module.ComposerLoss.Config(), BaseLoss.Config)
    assert loss_module.ComposerLoss.Config().to_dict()["policy"] == "grpo@torchtitan"
