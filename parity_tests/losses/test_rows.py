"""A row that could not be run is rejected in one line; a function named by import path gets a row."""

import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_plugins.errors import ConfigError
from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import Choice, choose
from composer_plugins.losses.derived import check_row
from composer_plugins.losses.inputs import INPUTS
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import REQUIRED, Dialect, Loss, Parameter
from parity_tests.rigs.commands import invoke

KERNELS = '''from composer_plugins.kernels.types import TokenLoss
def mine(logprobs, advantages, mask, *, entropies=None, scale=0.5): ...
def by_keyword(*, logprobs, advantages, mask, scale=0.5): ...
def critic(logprobs, critic_values, mask): ...
def outside(logprobs, advantages, mask, *, entropies=None, scale=-1): ...
def pair(chosen, rejected): ...
def inputless(): ...
def writes(logprobs, advantages, mask):
    return TokenLoss(-logprobs * advantages.mul_(2), {})
def loss(logprobs, advantages, mask, *, entropies=None, scale, bonus="none", **others):
    """Return a loss.

    More of it."""
    return scale * advantages * logprobs, entropies, bonus
pair.average, mine.mode = True, "token-sum"
thing, bare = 3, type
'''
MINE = Loss(
    name="mine",
    kind="policy",
    path="foreign_kernels:mine",
    summary="a loss of mine",
    paper="a note",
    proof="test_mine.py::test_it",
    needs=("logprobs", "advantages", "mask"),
    optional=("entropies",),
    parameters={"scale": Parameter("how much", low=0)},
    mode="token-mean",
)


@pytest.fixture(autouse=True)
def foreign_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("foreign_kernels")
    exec(KERNELS, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def dialect(params: Mapping[str, Any] | None = None, upstream: str = "acme", **more: Any) -> Dialect:
    return Dialect(upstream=upstream, params=params or {}, source="a file", proof="a test", **more)


def test_a_sound_row_passes() -> None:
    check_row(MINE)
    check_row(replace(MINE, dialects=(dialect({"scale": 2.0}), dialect(upstream="acme<2"))))
    check_row(replace(MINE, kind="divergence", mode=""))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        # its name and kind
        ({"kind": "polcy"}, "loss 'mine': unknown kind 'polcy'; did you mean 'policy'?"),
        *(({"name": name}, f"policy {name!r}: the name is empty, has a blank at an end, or has '@' or ':' in "
          "it; rename the loss") for name in ("mine@trl", "a:b", "", " mine", None)),
        # types of data
        ({"summary": None}, "summary: it is None; set a string"),
        # inputs and modes
        ({"needs": ("logprobs", "old_logprob")}, "old_logprob: it is not an input that any framework "
         "provides; did you mean 'old_logprobs'? composer_plugins/losses/inputs.py lists all"),
        ({"needs": ("logprobs", "xyz")}, "xyz: it is not an input that any framework provides;"),
        ({"mode": ""}, "mode: a policy loss has one, the denominator of its paper; set one of token-mean, "),
        ({"mode": "token_mean"}, "mode: unknown mode 'token_mean'; did you mean 'token-mean'?"),
        ({"dialects": (dialect(mode="sum"),)}, "mode: unknown mode 'sum'; known: "),
        # the kernel's signature
        ({"optional": ("entropies", "values")}, "values: the row names it, and foreign_kernels:mine does"),
        ({"path": "foreign_kernels:critic"}, "critic_values: the kernel foreign_kernels:critic takes it"),
        ({"needs": ("logprobs", "advantages")}, "mask: the kernel foreign_kernels:mine takes it, and the"),
        ({"needs": ("logprobs", "mask", "advantages")}, "needs: they are logprobs, mask, advantages, and "
         "foreign_kernels:mine takes by position logprobs, advantages, mask; name the first positional"),
        ({"path": "foreign_kernels:by_keyword", "optional": ()}, "needs: they are logprobs, advantages,"),
        ({"parameters": {}}, "scale: the kernel foreign_kernels:mine takes it, and the row names it in"),
        ({"path": "foreign_kernels:outside"}, "its defaults.scale: it is -1; set a finite number in [0,"),
        # dialects
        ({"dialects": (dialect({"scael": 1.0}),)}, "dialect 'mine@acme', scael: unknown mine parameter"),
        ({"dialects": (dialect({"scale": -1.0}),)}, "dialect 'mine@acme', scale: it is -1.0; set a finite"),
        ({"dialects": (dialect(), dialect({"scale": 1.0}))}, "dialect 'mine@acme': the row has it twice;"),
        ({"dialects": (dialect(upstream=None),)}, "dialect 'mine@None', upstream: it is None; set a string"),
        ({"dialects": (dialect(note=None),)}, "dialect 'mine@acme', note: it is None; set a string"),
        # its path
        ({"path": "nowhere:mine"}, "path: 'nowhere:mine' cannot be imported: ModuleNotFoundError: No module "
         "named 'nowhere'; make `import nowhere` work where this runs"),
        ({"path": "mine/nowhere.py:mine"}, "; write nowhere:mine, where Python finds nowhere.py"),
        ({"path": "foreign_kernels:mien"}, "path: 'foreign_kernels:mien' does not exist: foreign_kernels "
         "has no function 'mien'; did you mean 'mine'?"),
        ({"path": "foreign_kernels:thing"}, "has no function 'thing'; correct the path: module:function"),
    ],
)  # fmt: skip
def test_a_row_that_could_not_be_run_is_rejected(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_row(replace(MINE, **changes))
    assert error in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value).startswith(("policy 'mine', ", error))
    assert sum(name in str(refused.value) for name in INPUTS) < 8  # not a list of all


# A loss by import path


def chosen(function: str, params: Mapping[str, Any] | None = None, kind: Any = "policy") -> Choice:
    return choose(kind, f"foreign_kernels:{function}", params, option=kind)


def test_the_row_of_an_import_path_is_derived_from_the_signature() -> None:
    choice = chosen("loss", {"scale": "anything"})
    row = choice.loss
    assert (row.name, row.path, row.summary) == ("foreign_kernels:loss",) * 2 + ("Return a loss.",)
    assert (row.needs, row.optional) == (("logprobs", "advantages", "mask"), ("entropies",))
    assert row.defaults == {"scale": REQUIRED, "bonus": "none"} and choice.value("bonus") == "none"
    assert (row.mode, chosen("mine").mode) == ("", "token-sum")
    assert (row.average, chosen("pair", kind="preference").average) == (False, True)


def test_a_loss_by_import_path_is_called_as_one_of_ours() -> None:
    batch = {"mask": None, "advantages": torch.tensor(2.0), "logprobs": torch.tensor(3.0), "entropies": 1.0}
    choice = chosen("loss", {"scale": 5.0})
    assert call(choice, batch) == (30.0, 1.0, "none")  # an optional input is passed where the batch has it
    del batch["entropies"]
    assert call(choice, batch, bonus="some") == (30.0, None, "some")


def test_the_import_path_of_one_of_ours_is_its_row() -> None:
    assert choose("policy", "composer_plugins.kernels.policy:clip_cov").loss.over_batch


@pytest.mark.parametrize(
    ("function", "params", "error"),
    [
        ("inputless", {}, "policy: 'foreign_kernels:inputless' takes no input by position; take inputs"),
        ("critic", {}, "policy: 'foreign_kernels:critic' takes 'critic_values' by position, which is not an "
         "input of a policy loss; "),
        ("outside", {"scael": 1}, "policy_params.scael: unknown foreign_kernels:outside parameter"),
        ("loss", {}, "policy_params.scale: 'foreign_kernels:loss' has no default for it; set it"),
        ("lost", {}, "policy: 'foreign_kernels:lost' does not exist: foreign_kernels has no function"),
        ("thing", {}, "policy: 'foreign_kernels:thing' does not exist: foreign_kernels has no function"),
        ("bare", {}, "policy: 'foreign_kernels:bare' has no signature; name a function written in Python"),
        ("", {}, "policy: 'foreign_kernels:' does not exist: foreign_kernels has no function ''"),
        ("loss", {"scale": float("nan")}, "policy_params.scale: it is nan; set a finite number"),
        ("mine", {"scale": "x"}, "policy_params.scale: it is 'x'; set a number, as the default 0.5 is"),
        ("mine", {"scale": True}, "policy_params.scale: it is True; set a number, as the default 0.5 is"),
        ("loss", {"scale": 1, "bonus": 2}, "policy_params.bonus: it is 2; set a string, as the default "),
    ],
)  # fmt: skip
def test_a_function_that_is_not_a_loss_is_rejected(function: str, params: Any, error: str) -> None:
    with pytest.raises(ConfigError) as refused:
        chosen(function, params)
    assert str(refused.value).startswith(error)


def test_a_loss_that_writes_to_an_input_is_an_error() -> None:
    """By import path and of a plugin, at every call: only our own kernels are not checked."""
    batch = {"logprobs": torch.ones(2, 3), "advantages": torch.ones(2, 1), "mask": torch.ones(2, 3).bool()}
    choice = chosen("writes")
    for name in (choice.loss.name, "of_a_plugin"):
        wrong = f"'{name}' writes to its input 'advantages', .*; compute on a copy"
        with pytest.raises(ConfigError, match=wrong):
            call(replace(choice, loss=replace(choice.loss, name=name)), batch)
    assert not choose("policy", "grpo").is_third_party
    with torch.inference_mode():
        call(choice, {name: x.clone() for name, x in batch.items()})  # no versions are counted


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise SystemExit", "SystemExit"),
        ("import pytest; pytest.skip('no GPU', allow_module_level=True)", "Skipped: no GPU"),
        ("class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute", "Mute"),
        ("def __getattr__(name): raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_module_that_raises_anything_on_import_is_an_error(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_losses.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_losses", raising=False)
    problem = f"'odd_losses:loss' cannot be imported: {reason}; make `import odd_losses` work where this runs"
    commands = ("check {}", "explain {}", "diff {} grpo", "migrate --to trl --loss {}")
    for words in (command.format("odd_losses:loss") for command in commands):
        raised = invoke(*words.split()).exception
        assert isinstance(raised, ConfigError) and problem in str(raised), words
        assert raised.key in {"loss", "NAME", "FIRST", "--loss"}


def test_ctrl_c_during_an_import_ends_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "interrupted_losses.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        choose("policy", "interrupted_losses:loss")


def test_a_dot_before_the_function_is_corrected_to_a_colon() -> None:
    with pytest.raises(ConfigError, match="write 'my_package.losses:mine'"):
        choose("policy", "my_package.losses.mine")


def test_losses_of_one_formula_are_those_that_differ_in_numbers_alone() -> None:
    groups = list[list[Loss]]()
    for loss in losses():
        same = next((one for one in groups if one[0].is_formula_of(loss)), None)
        groups.append([loss]) if same is None else same.append(loss)
    found = [[one.name for one in group] for group in groups if len(group) > 1]
    assert found == [["ppo", "grpo", "dapo", "dr_grpo"], ["gspo", "luspo"], ["reinforce", "rloo", "gpg"]]
