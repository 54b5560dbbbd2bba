"""What `explain` shows of a loss, as a stranger reads it."""

import sys
import types
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from typer.testing import CliRunner

from composer_plugins import plugins
from composer_plugins.catalogue import REQUIRED, Loss, Parameter
from composer_plugins.cli import app
from composer_plugins.hookspecs import hookimpl
from composer_plugins.plugins import losses

RUN = CliRunner(env={"COLUMNS": "200"})
LOSSES = losses()


def explained(*words: str) -> str:
    done = RUN.invoke(app, ["explain", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.kind}-{loss.name}")
def test_every_loss_can_be_explained(loss: Loss) -> None:
    text = explained(loss.name, "--kind", loss.kind)
    assert loss.paper.split()[0] in text
    for name in (*loss.needs, *loss.parameters):
        assert name in text
    for dialect in loss.dialects:
        assert f"{loss.name}@{dialect.upstream}" in text
    _, _, numbers = text.partition("on the worked example")
    assert "nan" not in numbers and any(
        line.split()[-1][-1].isdigit() for line in numbers.splitlines() if line
    )


def test_dialects_stand_side_by_side_with_different_numbers() -> None:
    _, _, numbers = explained("cispo").partition("on the worked example")
    (row,) = [line.split() for line in numbers.splitlines() if "rollout 0 token 1" in line and "-1.2" in line]
    assert row[-3:] == ["0.889", "0.96", "0.24"]  # the paper's, verl's, TRL's


def test_what_a_dialect_leaves_at_its_default_is_shown_in_parentheses() -> None:
    def row(name: str, parameter: str) -> list[str]:
        (line,) = [one for one in explained(name).splitlines() if one.startswith(f"  {parameter} ")]
        return line.split()[1:]

    assert row("gdpo", "ddof")[:3] == ["1", "(1)", "(1)"]
    assert row("seq-mean-token-sum-norm", "max_length")[:5] == ["required", "width", "width", "512", "512"]


def test_a_kind_that_no_adapter_runs_is_called_a_part() -> None:
    for name in ("k1", "token-mean"):
        assert "runs in  a part: call the kernel" in explained(name)
    assert "runs in      no framework here yet: call the kernel" in explained("dppo_topk_tv")
    assert "trl" in explained("reinforce").partition("runs in")[2].splitlines()[0]


def numbers(*words: str) -> list[str]:
    return explained(*words).partition("on the worked example\n")[2].splitlines()


def test_the_example_shows_an_input_with_more_axes_than_the_result_whole() -> None:
    token_loss, mask, heading, *_ = numbers("token-mean")
    assert token_loss.split(maxsplit=1) == ["token_loss", "[[0.4, -0.2, 0.3], [0.5, 0.1, 0]]"]
    assert mask.split(maxsplit=1) == ["mask", "[[1, 1, 1], [1, 1, 0]]"]
    assert heading.split()[:2] == ["value", "default"]
    assert numbers("gdpo")[0].startswith("  reward_components  [[")


def test_the_example_names_the_values_it_takes_where_there_is_no_default() -> None:
    assert numbers("dro")[0].startswith("  with beta=") and numbers("dro")[0].endswith(
        "(no default: an example)"
    )
    assert not any("no default: an example" in line for line in numbers("cispo"))


KERNELS = """
def raises(logprobs, mask): raise ValueError("no\\nGPU")
def nothing(logprobs, mask): return None
def required(logprobs, mask, *, scale): return logprobs * scale
"""


def explain_foreign(function: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    module: Any = types.ModuleType("foreign")
    exec(KERNELS, module.__dict__)
    row = Loss(
        name="mine", kind="policy", path=f"foreign:{function}", summary="a loss of mine", paper="a note",
        proof="test_mine.py::test_it", needs=("logprobs", "mask"), mode="token-mean", **changes,
    )  # fmt: skip

    @hookimpl
    def register_losses(register: Any) -> None:
        register(row)

    module.register_losses = register_losses
    monkeypatch.setitem(sys.modules, "foreign", module)
    installed = [("acme 2.5", EntryPoint("x", "foreign", plugins.GROUP))]
    monkeypatch.setattr(plugins, "_installed", lambda: installed)
    return RUN.invoke(app, ["explain", "mine"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "ValueError: no GPU"),
        ("nothing", "TypeError: it returned None; wanted a tensor, or what has one as its loss"),
    ],
)
def test_a_plugins_kernel_that_fails_is_named_below_the_page(
    function: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = explain_foreign(function, monkeypatch)
    assert done.exit_code == 1
    assert "a loss of mine" in done.stdout and "on the worked example" not in done.stdout
    where = f"policy 'mine': its kernel foreign:{function} fails on the worked example"
    assert done.stderr == f"error: plugin of acme 2.5: {where}: {message}\n"


def test_a_required_parameter_without_an_example_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    done = explain_foreign("required", monkeypatch, parameters={"scale": Parameter(REQUIRED, "how much")})
    assert done.exit_code == 1 and "ValueError: scale has neither a default nor an example" in done.stderr
