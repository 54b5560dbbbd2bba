"""What `list` and `explain` show, as a stranger reads it."""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from composer_plugins import listing
from composer_plugins.cli import app
from composer_plugins.errors import ConfigError
from composer_plugins.kernels import preference
from composer_plugins.plugins import collect, get_plugin_manager, losses

RUN = CliRunner(env={"COLUMNS": "200"})
LOSSES = losses()


def output(*words: str) -> str:
    done = RUN.invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def listed(*words: str) -> list[dict[str, Any]]:
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
        assert list(row["parameters"]) == list(loss.parameters)
        assert all(row[key] for key in ("summary", "paper", "proof", "kernel", "needs", "distribution"))
        assert [d["name"] for d in row["dialects"]] == [f"{loss.name}@{d.upstream}" for d in loss.dialects]


def test_filters_keep_what_they_say() -> None:
    assert {row["kind"] for row in listed("--kind", "kl")} == {"kl"}
    names = {row["name"] for row in listed("--needs", "rollout_logprobs", "--kind", "policy")}
    assert "dppo_tv" in names and "grpo" not in names


def upstreams(rows: list[dict[str, Any]]) -> set[str]:
    return {d["name"].partition("@")[2] for row in rows for d in row["dialects"]}


def test_framework_keeps_what_its_adapter_runs_with_every_dialect() -> None:
    in_trl = {row["name"]: row for row in listed("--framework", "trl", "--kind", "policy")}
    assert "reinforce" in in_trl and "dppo_topk_tv" not in in_trl
    assert upstreams([in_trl["cispo"]]) == {"verl", "trl"}
    everything = {row["name"]: row for row in listed("--kind", "policy")}
    assert all(row["dialects"] == everything[name]["dialects"] for name, row in in_trl.items())
    assert all("trl" in row["frameworks"] for row in in_trl.values())
    assert {row["kind"] for row in listed("--framework", "trl")} == {"policy", "divergence", "preference"}


def test_dialects_of_keeps_one_upstreams_dialects_whoever_runs_them() -> None:
    of_verl = listed("--dialects-of", "verl")
    assert "kl" in {row["kind"] for row in of_verl} and all(row["dialects"] for row in of_verl)
    assert upstreams(of_verl) >= {"verl", "verl<0.7.1"}
    assert {name.partition("<")[0] for name in upstreams(of_verl)} == {"verl"}
    assert upstreams(listed("--dialects-of", "verl<0.7.1")) == {"verl<0.7.1"}
    both = listed("--framework", "trl", "--dialects-of", "verl", "--kind", "policy")
    assert upstreams(both) == {"verl"} and all("trl" in row["frameworks"] for row in both)


def test_a_dialect_that_takes_what_its_framework_has_not_is_left_out() -> None:
    found = collect(get_plugin_manager(entry_points=False))
    (row,) = [loss for loss in found.losses if loss.kind == "policy" and loss.name == "grpo"]
    dialects = (
        replace(row.dialects[0], upstream="a", takes=("values",)),
        replace(row.dialects[0], upstream="b"),
    )
    registry = found._replace(losses=(replace(row, optional=("values",), dialects=dialects),))
    ((_, shown),) = listing.select(registry, framework="trl")
    assert [dialect.upstream for dialect in shown] == ["b"]


def test_the_count_of_one_is_singular() -> None:
    assert output("list", "--kind", "policy", "--dialects-of", "sdpo").splitlines() == ["no loss matches"]
    (row,) = [loss for loss in LOSSES if loss.kind == "policy" and loss.name == "cispo"]
    assert listing.count([(row, list(row.dialects[:1]))]) == "1 policy loss, 1 dialect"
    assert listing.count([(row, []), (row, [])]) == "2 policy losses, 0 dialects"


def test_no_line_ends_in_blanks() -> None:
    for words in (["list", "--kind", "kl"], ["explain", "cispo"]):
        lines = output(*words).splitlines()
        assert len(lines) > 10 and [line for line in lines if line != line.rstrip()] == []


def test_json_writes_an_open_bound_as_one() -> None:
    (dpo,) = [row for row in listed("--kind", "preference") if row["name"] == "dpo"]
    assert dpo["parameters"]["beta"] == {
        "help": "how strongly the reference holds",
        "default": 0.1,
        "low": 0,
        "low_open": True,
    }
    assert dpo["parameters"]["label_smoothing"]["high"] == 0.5
    assert "e-324" not in output("list", "--json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list", "--kind", "polcy"], "unknown kind 'polcy': did you mean 'policy'?"),
        (["list", "--needs", "old_logprob"], "unknown input 'old_logprob': did you mean 'old_logprobs'?"),
        (["list", "--framework", "vrel"], "unknown framework 'vrel': did you mean 'verl'?"),
        (["list", "--framework", "TRL"], "unknown framework 'TRL': did you mean 'trl'?"),
        (["list", "--dialects-of", "vrel"], "unknown upstream 'vrel': did you mean 'verl'?"),
        (["explain", "cipso"], "unknown loss 'cipso': did you mean 'cispo'?"),
        (["explain", "Grpo"], "unknown loss 'Grpo': did you mean 'grpo'?"),
        (
            ["explain", "dppo"],
            "unknown loss 'dppo': did you mean 'dppo_kl', 'dppo_tv', 'dppo_topk_kl' or 'dppo_topk_tv'?",
        ),
        (["explain", "cispo", "--kind", "polcy"], "unknown kind 'polcy': did you mean 'policy'?"),
        (["explain", "cispo", "--kind", "advantage"], "'cispo' is a policy loss, not an advantage"),
        (["explain", "cispo@vrel"], "unknown dialect 'cispo@vrel': did you mean 'cispo@verl'?"),
        (["explain", "cispo@tlr"], "unknown dialect 'cispo@tlr': did you mean 'cispo@trl'?"),
        (
            ["explain", "cispo@nope"],
            "unknown dialect 'cispo@nope'; known: cispo@trl, cispo@verl ('cispo' alone is the paper's)",
        ),
    ],
)
def test_an_unknown_word_names_the_known_ones(words: list[str], message: str) -> None:
    result = RUN.invoke(app, words)
    assert isinstance(result.exception, ConfigError) and str(result.exception) == message


def test_a_framework_without_an_adapter_is_told_where_its_dialects_are() -> None:
    said = refusal("list", "--framework", "oat")
    assert said.startswith("no adapter for 'oat' yet (there is one for trl")
    assert said.endswith("its losses as the catalogue has them: composer-plugins list --dialects-of oat")


def refusal(*words: str) -> str:
    return str(RUN.invoke(app, words).exception)


def test_a_dialect_of_a_name_that_two_kinds_share_is_listed_by_kind() -> None:
    said = refusal("explain", "grpo@nope")
    assert (
        said.startswith("unknown dialect 'grpo@nope'; known: policy grpo@verl, ")
        and "; advantage grpo@" in said
    )
    policy, _, advantage = said.partition("; advantage ")
    assert policy.count("grpo@trl") == advantage.count("grpo@trl") == 1


def test_no_name_and_a_name_like_none_are_answered_with_some_of_what_there_is() -> None:
    assert refusal("explain", "").startswith("loss: no name given; known: ")
    for name in ("", "@trl", "xyz"):
        said = refusal("explain", name)
        assert said.count(",") == 7 and said.endswith("more (composer-plugins list shows all)")


@pytest.mark.parametrize(
    ("name", "where"), [("wpo", "wpo_weights"), ("LD-DPO", "ld_logprobs"), ("bnpo", "grpo@trl")]
)
def test_a_part_that_people_ask_for_as_a_loss_is_shown_its_place(name: str, where: str) -> None:
    said = refusal("explain", name)
    assert said.startswith(f"{name!r} is no loss of its own: it ") and where in said
    assert where.partition("@")[0] in {*preference.__all__, "grpo"}
