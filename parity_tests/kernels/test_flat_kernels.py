"""`from composer_plugins.kernels import dapo`: every kernel under one flat name, loaded when it is used."""

from importlib import import_module
from typing import Any

import pytest

from composer_plugins import flat_kernels, kernels
from parity_tests.rigs.every import rows
from parity_tests.rigs.programs import python


def test_every_kernel_of_the_catalogue_has_a_name() -> None:
    found = flat_kernels.paths()
    assert {row.path for row in rows()} <= {*found.values()} and {"aggregate", "TokenLoss"} <= {*found}
    for name, path in found.items():
        module, _, function = path.partition(":")
        assert getattr(kernels, name) is getattr(import_module(module), function)
    assert {*found} <= {*dir(kernels)}


def test_a_shared_name_is_the_policy_losss_and_a_module_keeps_its_own() -> None:
    from composer_plugins.kernels import grpo, grpo_advantage, ipo_preference, taid, taid_divergence

    assert (grpo, taid) == (import_module("composer_plugins.kernels.policy").grpo, taid)
    assert [f.__module__.split(".")[2] for f in (grpo_advantage, ipo_preference, taid_divergence)] == [
        "advantages",
        "preference",
        "taid",
    ]
    assert not callable(taid)


def test_a_name_that_no_kernel_has_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'dapoo'"):
        exec("from composer_plugins.kernels import dapoo")
    assert not hasattr(kernels, "__file__") or kernels.__file__ is None


@pytest.mark.thorough
def test_the_names_are_listed_without_loading_torch() -> None:
    program = "import sys; from composer_plugins import kernels; assert 'dapo' in dir(kernels); "
    program += "assert 'torch' not in sys.modules; from composer_plugins.kernels import dapo; dapo.__doc__"
    assert python("-c", program).returncode == 0


def test_the_stub_for_type_checkers_has_the_same_names() -> None:
    found = dict[str, Any]()
    exec(flat_kernels.stub(), found)
    assert sorted(found["__all__"]) == sorted(flat_kernels.paths())
    assert all(found[name] is getattr(kernels, name) for name in found["__all__"])
