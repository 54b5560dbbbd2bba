"""PRIME-RL's own tests of its loss, from a checkout, pass with ours in the place of its default loss."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from composer_plugins.adapters import prime_rl_plugin
from composer_plugins.adapters.prime_rl_plugin import migration
from composer_plugins.adapters.prime_rl_plugin import upstream as contract
from composer_plugins.conformance.prime_rl_claims.claims import OURS
from composer_plugins.conformance.prime_rl_claims.upstream import Upstream
from composer_plugins.conformance.stubs import source
from parity_tests.rigs.prime_rl_checkout import with_checkout
from parity_tests.rigs.prime_rl_cpu.device import OnCpu

FILE = "tests/unit/train/rl/test_loss.py"
SETUP = "setup_rl_loss_fn"
# Tests that pass too, but in which the default loss computes nothing: their names begin like this.
WITHOUT = {
    "test_entropy_": "it tests the entropy, which is no loss",
    "test_setup_": "it imports a custom loss of its own, and looks for that one's metric",
    "test_sft_": "it trains on examples, without the loss over advantages",
    "test_ce_": "the weights of the loss over advantages are 0, and it is not called",
    "test_empty_": "no token is trained, and the loss is not called",
}


def names() -> list[str]:
    """The tests in the checkout's file, which is not imported for this."""
    checkout = source("prime-rl")
    if checkout is None or not (file := checkout / FILE).is_file():
        return []
    body = ast.parse(file.read_text()).body
    return [one.name for one in body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")]


@pytest.fixture(scope="module")
def theirs(upstream: Upstream) -> ModuleType:
    sys.path.insert(0, str(source("prime-rl")))
    with patch.object(pytest, "mark"):  # it marks its tests "gpu", which pytest does not know here
        return import_module(FILE.removesuffix(".py").replace("/", "."))


@with_checkout
def test_the_checkout_has_tests_of_its_loss() -> None:
    assert any(not name.startswith(tuple(WITHOUT)) for name in names())


@with_checkout
@pytest.mark.parametrize("name", names() or ["none"])
def test_its_own_test_passes_with_our_loss(
    name: str, upstream: Upstream, theirs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(inputs: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return loss_fn(inputs, **kwargs)

    def with_ours(config: Any) -> Any:
        if isinstance(config, upstream.config.DefaultLossConfig):
            kwargs = migration.kwargs_of(config.model_dump())
            config = upstream.config.CustomLossConfig(import_path=OURS, kwargs=kwargs)
        return setup(config)

    loss_fn: Callable[..., Any] = prime_rl_plugin.loss_fn
    setup = getattr(theirs, SETUP)
    monkeypatch.setattr(prime_rl_plugin, "loss_fn", counted)
    monkeypatch.setattr(contract, "LARGEST_LOGPROB", float("inf"))  # theirs are drawn around 0
    monkeypatch.setattr(theirs, SETUP, with_ours)
    with OnCpu():
        getattr(theirs, name)()
    assert bool(calls) is not name.startswith(tuple(WITHOUT)), "ours was in the place of the default"
