"""A plugin's row is refused for what would go wrong when it is run, in one line that names it."""

import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from composer_plugins.catalogue import REQUIRED, Dialect, Loss, Parameter
from composer_plugins.errors import ConfigError
from composer_plugins.inputs import INPUTS
from composer_plugins.rows import check_row

KERNELS = """
def mine(logprobs, advantages, mask, *, entropies=None, scale=0.5): ...
def by_keyword(*, logprobs, advantages, mask, scale=0.5): ...
def critic(logprobs, critic_values, mask): ...
def ones(logprobs, advantages, mask, *, entropies=1, scale=0.5): ...
thing = 3
"""
MINE = Loss(
    name="mine",
    kind="policy",
    path="foreign_kernels:mine",
    summary="a loss of mine",
    paper="a note",
    proof="test_mine.py::test_it",
    needs=("logprobs", "advantages", "mask"),
    optional=("entropies",),
    parameters={"scale": Parameter(0.5, "how much", low=0)},
    dialects=(),
    mode="token-mean",
)


@pytest.fixture(autouse=True)
def foreign_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("foreign_kernels")
    exec(KERNELS, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def problem(**changes: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        check_row(replace(MINE, **changes))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def dialect(params: Mapping[str, Any] | None = None, upstream: str = "acme", **more: Any) -> Dialect:
    return Dialect(upstream=upstream, params=params or {}, source="a file", proof="a test", **more)


def test_a_sound_row_is_not_refused() -> None:
    check_row(MINE)
    check_row(replace(MINE, dialects=(dialect({"scale": 2.0}), dialect(upstream="acme<2"))))
    check_row(replace(MINE, kind="divergence", mode=""))


def test_what_is_no_row_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"register\(\) got 'grpo'; wanted a composer_plugins.catalogue.Loss"
    ):
        check_row("grpo")
    assert problem(kind="polcy").startswith("loss 'mine' has kind 'polcy'; known: policy")
    assert (
        problem(name="mine@trl")
        == "policy 'mine@trl': a name is not empty and has no '@' (that is a dialect)"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"needs": ("logprobs")}, "needs is a string; wanted a tuple: ('logprobs',)"),
        ({"optional": ("entropies")}, "optional is a string; wanted a tuple: ('entropies',)"),
        ({"needs": None}, "needs is None; wanted a tuple, each of it a string"),
        ({"needs": ("logprobs", 3)}, "needs holds 3; wanted a string"),
        ({"summary": None}, "summary is None; wanted a string"),
        ({"parameters": ("scale",)}, "parameters is ('scale',); wanted a mapping of names to Parameter(...)"),
        ({"parameters": {"scale": 0.5}}, "parameter 'scale' is 0.5; wanted a Parameter(0.5, help)"),
        ({"dialects": ({"scale": 1.0},)}, "dialects holds {'scale': 1.0}; wanted a Dialect"),
        ({"dialects": (dialect())}, "dialects is a Dialect; wanted a tuple: (Dialect(...),)"),
        ({"optional": ("mask",)}, "its row names 'mask' twice in needs, optional, parameters"),
    ],
)
def test_data_of_the_wrong_type_is_refused(changes: dict[str, Any], message: str) -> None:
    assert problem(**changes) == f"policy 'mine': {message}"


def test_an_input_that_nobody_provides_is_refused_without_a_list_of_all() -> None:
    assert problem(needs=("logprobs", "old_logprob")) == (
        "policy 'mine': it needs 'old_logprob', an input that nobody provides: did you mean 'old_logprobs'? "
        "composer_plugins/inputs.py lists all"
    )
    assert problem(needs=("logprobs", "xyz")) == (
        "policy 'mine': it needs 'xyz', an input that nobody provides; composer_plugins/inputs.py lists all"
    )
    taken = problem(path="foreign_kernels:critic", needs=("logprobs", "mask"), optional=(), parameters={})
    assert "its kernel foreign_kernels:critic takes 'critic_values', an input that nobody provides" in taken
    assert sum(name in taken for name in INPUTS) < 4


@pytest.mark.parametrize(
    ("dialects", "message"),
    [
        (
            (dialect({"scael": 1.0}),),
            "its dialect 'mine@acme': unknown parameter of 'mine' 'scael': did you mean",
        ),
        (
            (dialect({"scale": -1.0}),),
            "its dialect 'mine@acme': mine's parameter 'scale' is -1.0; wanted a finite",
        ),
        ((dialect(), dialect({"scale": 1.0})), "its dialect 'mine@acme' is there twice: an upstream has one"),
        ((dialect(upstream=""),), "the upstream of a dialect is ''; wanted a name"),
        ((dialect(note=None),), "its dialect 'mine@acme': note is None; wanted a string"),
        (
            (dialect(counts={"scale": "tokens"}),),
            "its dialect 'mine@acme': counts has 'scale': 'tokens'; wanted",
        ),
        (
            (dialect(takes=("values",)),),
            "its dialect 'mine@acme' takes 'values', which is not among the row's",
        ),
    ],
)
def test_a_dialect_that_could_not_be_chosen_is_refused(dialects: Any, message: str) -> None:
    assert problem(dialects=dialects).startswith(f"policy 'mine': {message}")


def test_needs_in_another_order_than_the_kernels_are_refused() -> None:
    assert problem(needs=("logprobs", "mask", "advantages")) == (
        "policy 'mine': its needs are logprobs, mask, advantages, and its kernel foreign_kernels:mine takes "
        "by position logprobs, advantages, mask: needs are the first of these, in their order"
    )
    assert "takes by position nothing" in problem(path="foreign_kernels:by_keyword", optional=())
    in_no_list = problem(needs=("logprobs", "advantages"))
    assert "takes 'mask', which its row lists in none of needs, optional, parameters" in in_no_list
    assert "its row names 'values', which foreign_kernels:mine does not take" in problem(
        optional=("entropies", "values")
    )


def test_a_default_that_is_not_the_kernels_is_refused() -> None:
    said = "policy 'mine': the default of 'scale' is {} in its row and 0.5 in its kernel"
    assert problem(parameters={"scale": Parameter(1.0, "how much")}) == said.format("1.0")
    assert problem(parameters={"scale": Parameter(REQUIRED, "how much", example=1)}) == said.format(
        "required"
    )
    assert "takes 'scale', which its row lists in none of" in problem(parameters={})
    outside = problem(parameters={"scale": Parameter(0.5, "how much", low=1)})
    assert outside.startswith("policy 'mine': its defaults: mine's parameter 'scale' is 0.5; wanted")
    optional = problem(path="foreign_kernels:ones")
    assert optional.endswith("the default of 'entropies' is None in its row and 1 in its kernel")


def test_a_policy_loss_has_a_mode_that_there_is() -> None:
    assert "a policy loss has a mode, its paper's denominator: one of token-mean, token-sum," in problem(
        mode=""
    )
    assert (
        problem(mode="token_mean") == "policy 'mine': unknown mode 'token_mean': did you mean 'token-mean'?"
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("foreign_kernels.mine", "path is 'foreign_kernels.mine'; wanted module:function"),
        ("foreign_kernels:", "path is 'foreign_kernels:'; wanted module:function"),
        (
            "nowhere:mine",
            "its kernel 'nowhere:mine' fails on import: ModuleNotFoundError: No module named 'nowhere'",
        ),
        (
            "foreign_kernels:mien",
            "its kernel 'foreign_kernels:mien' is not there: foreign_kernels has no function 'mien': "
            "did you mean 'mine'?",
        ),
        (
            "foreign_kernels:thing",
            "its kernel 'foreign_kernels:thing' is not there: foreign_kernels has no function 'thing'",
        ),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_ends(path: str, message: str) -> None:
    assert problem(path=path) == f"policy 'mine': {message}"
