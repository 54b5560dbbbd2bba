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


@pytest.mark.parametrize("name", ["GRPOLoss", "DAPOLoss"])
def test_the_metrics_that_torchtitan_logs_too_are_its_own(loss_module: Any, name: str) -> None:
    """`composer-plugins conform torchtitan` compares the values and the gradients."""
    batch, row = packed(), upstream.row_of(name)
    tokens = valid_tokens(batch)
    wanted = run(upstream.loss_class(name).Config().build(), batch, tokens)[2]
    found = run(make(loss_module, policy=row), batch, tokens)[2]
    shared = found.keys() & wanted.keys()
    assert len(shared) == 5
    for one in shared:
        assert_parity(found[one], wanted[one], terms=40, magnitude=10.0, dtype=torch.float32, what=one)


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
