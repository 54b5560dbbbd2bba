"""What `list` and `explain` show, as a stranger reads it."""

import json

import pytest
from typer.testing import CliRunner

from composer_plugins.catalogue import Loss
from composer_plugins.cli import app
from composer_plugins.errors import ConfigError
from composer_plugins.plugins import losses

RUN = CliRunner(env={"COLUMNS": "200"})
LOSSES = losses()


def output(*words: str) -> str:
    done = RUN.invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def listed(*words: str) -> list[dict[str, object]]:
    return json.loads(output("list", "--json", *words))["losses"]


def test_the_list_names_every_loss_with_its_source_and_its_proof() -> None:
    text = output("list")
    for loss in LOSSES:
        assert f"\n{loss.name} " in text and loss.paper.split()[0] in text
        for dialect in loss.dialects:
            assert f"  @{dialect.upstream}" in text
    assert "TODO" not in text
    assert "…" not in text  # nothing is cut off


def test_json_has_what_the_tables_have_and_every_parameter() -> None:
    rows = listed()
    assert [(row["kind"], row["name"]) for row in rows] == [(loss.kind, loss.name) for loss in LOSSES]
    for row, loss in zip(rows, LOSSES, strict=True):
        assert list(row["parameters"]) == list(loss.parameters)  # type: ignore[call-overload]
        assert all(row[key] for key in ("summary", "paper", "proof", "kernel", "needs", "distribution"))
        assert [d["name"] for d in row["dialects"]] == [  # type: ignore[attr-defined]
            f"{loss.name}@{d.upstream}" for d in loss.dialects
        ]


def test_filters_keep_what_they_say() -> None:
    assert {row["kind"] for row in listed("--kind", "kl")} == {"kl"}
    names = {row["name"] for row in listed("--needs", "rollout_logprobs", "--kind", "policy")}
    assert "dppo_tv" in names and "grpo" not in names
    of_verl = listed("--framework", "verl", "--kind", "policy")
    assert {d["name"].partition("@")[2] for row in of_verl for d in row["dialects"]} == {"verl"}  # type: ignore[attr-defined]
    in_trl = {row["name"] for row in listed("--framework", "trl", "--kind", "policy")}
    assert "reinforce" in in_trl and "dppo_topk_tv" not in in_trl


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list", "--kind", "polcy"], "unknown kind 'polcy': did you mean 'policy'?"),
        (["list", "--needs", "old_logprob"], "unknown input 'old_logprob': did you mean 'old_logprobs'?"),
        (["list", "--framework", "vrel"], "unknown framework 'vrel': did you mean 'verl'?"),
        (["explain", "cipso"], "unknown loss 'cipso': did you mean 'cispo'?"),
        (["explain", "cispo@vrel"], "unknown dialect 'cispo@vrel'; known: cispo@verl, cispo@trl"),
    ],
)
def test_an_unknown_word_names_the_known_ones(words: list[str], message: str) -> None:
    result = RUN.invoke(app, words)
    assert isinstance(result.exception, ConfigError) and str(result.exception) == message


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.kind}-{loss.name}")
def test_every_loss_can_be_explained(loss: Loss) -> None:
    text = output("explain", loss.name, "--kind", loss.kind)
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
    _, _, numbers = output("explain", "cispo").partition("on the worked example")
    (row,) = [line.split() for line in numbers.splitlines() if "rollout 0 token 1" in line and "-1.2" in line]
    assert row[-3:] == ["0.889", "0.96", "0.24"]  # the paper's, verl's, TRL's
