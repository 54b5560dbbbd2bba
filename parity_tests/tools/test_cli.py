"""What `list` and `explain` print, and their errors."""

import inspect
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from composer_plugins.cli import app, example, listing, recorded, worked_example
from composer_plugins.losses.registry import collect, get_plugin_manager, losses
from composer_plugins.losses.row import KINDS, Loss
from parity_tests.rigs.commands import error, invoke, output
from parity_tests.rigs.every import each
from parity_tests.rigs.programs import python

LOSSES = losses()


# help


def help_of(*words: str, columns: int) -> str:
    done = CliRunner().invoke(app, [*words, "-h"], terminal_width=columns)  # it overrules COLUMNS
    assert done.exit_code == 0
    return done.stdout


def joined(text: str) -> str:
    """A text without blanks: terminals of different widths differ in nothing else."""
    return "".join(text.split())


@pytest.mark.parametrize("columns", (60, 80, 120))
def test_the_help_of_every_command_is_whole_at_any_width(columns: int) -> None:
    shown = joined(help_of(columns=columns))
    for name, command in typer.main.get_command(app).commands.items():
        assert joined(name + command.help.partition("\n")[0]) in shown
        lines = help_of(name, columns=columns).splitlines()
        texts = [command.help, *(one.help for one in command.params if hasattr(one, "help"))]
        assert all(joined(text) in joined("".join(lines)) for text in texts), name
        assert max(map(len, lines)) <= columns and not any(line.endswith("…") for line in lines)
    assert "--install-completion" in shown and "…" not in shown


# list


def listed(*words: str) -> list[dict[str, Any]]:
    return json.loads(output("list", "--json", *words))["losses"]


def upstreams(rows: list[dict[str, Any]]) -> set[str]:
    return {d["name"].partition("@")[2] for row in rows for d in row["dialects"]}


def test_the_list_has_one_line_to_a_loss_with_the_frameworks_that_run_it() -> None:
    lines = [line.rstrip() for line in output("list").splitlines()]
    assert max(map(len, lines)) <= 100 and max(map(len, output("list", columns=100).splitlines())) <= 100
    of_a_loss = [line.split() for line in lines if line.startswith("  ")]
    assert [words[0] for words in of_a_loss] == [
        loss.name for kind in KINDS for loss in LOSSES if loss.kind == kind
    ]
    assert len(lines) == len(LOSSES) + 2 * len(KINDS) + 3  # a heading and an empty line to a kind, two notes
    marks = {words[0]: words[1] for words in of_a_loss[:51]}
    assert (marks["cispo"], marks["gspo"], marks["clip_cov"]) == ("tvpsinlo", "tvpsinl.", "........")
    assert lines[0].startswith("runs in: t trl, v verl, p prime-rl, s skyrl, i tinker, n nemo-rl, l slime")
    assert "runs in" not in output("list", "--kind", "kl")  # which no framework can be told to run


def test_the_verbose_list_names_every_loss_with_its_source_and_its_proof() -> None:
    text = output("list", "-v")
    for loss in LOSSES:
        assert f"\n{loss.name} " in text and loss.paper.split()[0] in text
        assert all(f"  @{dialect.upstream}" in text for dialect in loss.dialects)
    assert "TODO" not in text


def test_json_has_every_loss_with_every_parameter_and_dialect() -> None:
    rows = listed()
    assert [(row["kind"], row["name"]) for row in rows] == [(loss.kind, loss.name) for loss in LOSSES]
    for row, loss in zip(rows, LOSSES, strict=True):
        assert list(row["parameters"]) == list(loss.parameters)
        assert all(row[key] for key in ("summary", "paper", "proof", "kernel", "needs", "distribution"))
        assert [d["name"] for d in row["dialects"]] == [f"{loss.name}@{d.upstream}" for d in loss.dialects]
    (dpo,) = [row for row in rows if row["name"] == "dpo"]
    beta, smoothing = (dpo["parameters"][name] for name in ("beta", "label_smoothing"))
    assert beta == {"help": beta["help"], "default": 0.1, "low": 0, "low_open": True}
    assert smoothing["high"] == 0.5 and "e-324" not in output("list", "--json")


def test_kind_and_needs_keep_the_losses_of_that_kind_with_that_input() -> None:
    assert {row["kind"] for row in listed("--kind", "kl")} == {"kl"}
    names = {row["name"] for row in listed("--needs", "rollout_logprobs", "--kind", "policy")}
    assert "dppo_tv" in names and "grpo" not in names


def test_framework_keeps_the_losses_that_its_adapter_runs_with_every_dialect() -> None:
    in_trl = {row["name"]: row for row in listed("--framework", "trl", "--kind", "policy")}
    assert "reinforce" in in_trl and "dppo_topk_tv" not in in_trl
    everything = listed("--kind", "policy")
    assert all(row in everything and "trl" in row["frameworks"] for row in in_trl.values())
    assert {row["kind"] for row in listed("--framework", "trl")} == {"policy", "divergence", "preference"}


def test_dialects_of_keeps_the_dialects_of_one_upstream_whichever_framework_runs_them() -> None:
    of_verl = listed("--dialects-of", "verl")
    assert "kl" in {row["kind"] for row in of_verl} and all(row["dialects"] for row in of_verl)
    assert {"verl", "verl<0.7.1"} <= upstreams(of_verl)
    assert {name.partition("<")[0] for name in upstreams(of_verl)} == {"verl"}
    assert upstreams(listed("--dialects-of", "verl<0.7.1")) == {"verl<0.7.1"}
    both = listed("--framework", "trl", "--dialects-of", "verl", "--kind", "policy")
    assert upstreams(both) == {"verl"} and all("trl" in row["frameworks"] for row in both)


@pytest.mark.parametrize(
    ("option", "one", "other", "joined"),
    [
        ("--kind", "kl", "correction", set.union),
        ("--dialects-of", "trl", "verl", set.union),
        ("--needs", "ref_logprobs", "old_logprobs", set.intersection),
        ("--framework", "trl", "verl", set.intersection),
    ],
)
def test_a_repeated_filter_keeps_any_or_all(option: str, one: str, other: str, joined: Any) -> None:
    def names(*words: str) -> set[tuple[str, str]]:
        return {(row["kind"], row["name"]) for row in listed(*words)}

    assert names(option, one, option, other) == joined(names(option, one), names(option, other))


def test_every_example_in_the_help_of_a_filter_is_accepted() -> None:
    annotations = inspect.signature(listing.list_losses).parameters
    for name in ("kind", "needs", "framework", "dialects_of"):
        (option,) = annotations[name].annotation.__metadata__
        examples = option.help.partition(": ")[2].removesuffix(" ...").split(", ")
        assert examples and all(listed(f"--{name.replace('_', '-')}", one) for one in examples)


def test_a_dialect_that_takes_an_input_which_its_framework_lacks_is_left_out() -> None:
    found = collect(get_plugin_manager(entry_points=False))
    (row,) = [loss for loss in found.losses if loss.kind == "policy" and loss.name == "grpo"]
    taking, plain = (replace(row.dialects[0], upstream=name, optional=()) for name in "ab")
    dialects = (replace(taking, optional=("values",)), plain)
    losses = [replace(row, optional=("values",), dialects=dialects)]
    ((_, shown),) = listing.select(losses, frameworks=["trl"])
    assert [dialect.upstream for dialect in shown] == ["b"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("gspo", {"gspo", "gspo_token", "luspo"}),  # the summary of luspo has it
        ("2402.03300", {"grpo", "seq-mean-token-mean"}),
        ("https://arxiv.org/abs/2402.03300", {"grpo", "seq-mean-token-mean"}),
        ("GEO_MEAN", {"gmpo"}),  # verl's name
        ("geo-mean", {"gmpo"}),
        ("reinforce++", {"reinforce_pp", "reinforce_pp_baseline"}),
        ("low_var_kl", {"k3", "k3_corrected", "k3_plus"}),
        ("ipo_threshold", {"dppo_tv", "dppo_topk_tv", "ipo", "ipo_centered", "ref_kl"}),  # a parameter there
        ("ipo_threshold centered", {"ipo_centered"}),
        ("ipo_threshold --framework trl", {"dppo_tv", "ipo"}),
        ("ipo_threshold grpo@trl", set()),
    ],
)
def test_a_search_finds_names_papers_summaries_and_the_names_of_frameworks(
    words: str, expected: set[str]
) -> None:
    assert {row["name"] for row in listed(*words.split())} == expected


def test_an_empty_list_says_what_a_word_may_have_meant() -> None:
    nothing = output("list", "--kind", "policy", "--dialects-of", "sdpo")
    assert nothing == "no loss matches; remove a word or an option\n"
    assert output("list", "cispo", "gspo") == nothing
    done = invoke("list", "cispo", "gspo", "--json")
    assert json.loads(done.stdout)["losses"] == [] and done.stderr.startswith("no loss matches")
    assert error("list", "dapoo", "--json") == error("list", "dapoo")


# explain


WITHOUT_TORCH = [["explain", "cispo"], ["explain", "grpo@trl", "--json"], ["diff", "cispo@trl", "cispo@verl"]]


@pytest.mark.parametrize("words", [*WITHOUT_TORCH, ["list", "--framework", "skyrl"]], ids=" ".join)
def test_what_is_recorded_is_shown_without_torch(words: list[str]) -> None:
    code = f"import sys; sys.argv[1:] = {words}; from composer_plugins.cli import main\ntry: main()\n"
    code += "finally: print('torch' in sys.modules, file=sys.stderr)"
    done = python("-c", code)
    assert done.stdout and done.stderr.splitlines()[-1] == "False", done.stderr


def test_the_numbers_are_computed_where_the_code_is_not_what_was_recorded(monkeypatch: Any) -> None:
    cispo = next(loss for loss in LOSSES if loss.name == "cispo")
    changed = replace(cispo, dialects=())
    monkeypatch.setattr(worked_example, "computed", lambda *given: "computed")
    assert example.example_of(cispo, [None]) != "computed" == example.example_of(changed, [None])
    recorded._records.cache_clear()
    monkeypatch.setattr(recorded, "code", lambda: "another kernel")
    assert example.example_of(cispo, [None]) == "computed"
    recorded._records.cache_clear()


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.thorough
@each()
def test_every_loss_can_be_explained(row: Loss) -> None:
    """The page at several widths: test_layout.py."""
    text = output("explain", "--json", row.name, "--kind", row.kind)
    (data,) = json.loads(text, parse_constant=no_constant)["losses"]
    assert row.paper == data["paper"] and [*row.parameters] == [*data["parameters"]]
    results = data["example"]["results"]
    assert [*results] == ["default", *(f"@{dialect.upstream}" for dialect in row.dialects)]
    assert all(results.values()) and '"nan"' not in json.dumps(results)


def test_json_has_everything_that_the_page_shows() -> None:
    (row,) = explained("gdpo")
    shown = json.dumps(row, ensure_ascii=False).replace('\\"', '"')
    page = output("explain", "gdpo", columns=400)
    facts, _, example = page.partition("on the worked example")
    facts = re.sub(r"^  values .*$", "", facts, flags=re.MULTILINE)  # the parameters of a dialect: name=value
    words = {word.strip("()[];,.@") for word in facts.split()} - {*["values", "runs", "from", "denominator"]}
    assert {word for word in words if word not in shown} == {"inf", "|"}  # no upper bound, and a list there
    results = row["example"]["results"]
    assert [*results] == ["default", *(f"@{one['name'].partition('@')[2]}" for one in row["dialects"])]
    for value in (x for result in results.values() for x in result["value"]):
        assert f"{value:.4g}" in example
    assert row["example"]["inputs"]["group_ids"] == [0, 0, 0, 1, 1, 2]


def explained(*words: str) -> list[dict[str, Any]]:
    found = json.loads(output("explain", "--json", *words))
    assert found["problems"] == []
    return found["losses"]


def test_json_has_one_loss_for_each_kind_and_only_the_dialect_that_is_named() -> None:
    assert [row["kind"] for row in explained("grpo")] == ["policy", "advantage"]
    (row,) = explained("cispo@trl")
    assert [one["name"] for one in row["dialects"]] == ["cispo@trl"]
    assert row["example"]["results"]["@trl"]["gradient"][0] == pytest.approx([-0.2, -0.2, -0.2])
    assert row["inputs"][0]["shape"] == "[*batch, tokens]"


def example_lines(*words: str) -> list[str]:
    return output("explain", *words).partition("on the worked example\n")[2].splitlines()


def test_a_dialect_shows_the_values_that_it_sets() -> None:
    def values(name: str) -> list[str]:
        lines = output("explain", name).splitlines()
        return [one.split(maxsplit=1)[1].strip() for one in lines if one.startswith("  values ")]

    assert values("cispo@trl") == ["clip_high=-0.8"]
    assert values("seq-mean-token-sum-norm@verl") == ["max_length=width"]
    assert any(line.split()[:2] == ["ddof", "1"] for line in output("explain", "gdpo").splitlines())


def test_the_page_says_which_frameworks_run_a_loss() -> None:
    for name in ("k1", "token-mean"):
        assert "runs in  a part of other losses: call the kernel" in output("explain", name)
    assert "runs in      no adapter yet: call the kernel" in output("explain", "dppo_topk_tv")
    assert "trl" in output("explain", "reinforce").partition("runs in")[2].splitlines()[0]


def test_the_example_shows_its_inputs_and_the_values_of_required_parameters() -> None:
    token_loss, mask, *_ = (line.split() for line in example_lines("token-mean"))
    assert (token_loss[0], mask[0]) == ("token_loss", "mask")
    assert example_lines("dro")[0].startswith("  with beta=")
    assert example_lines("dro")[0].endswith("(no default: an example)")
    assert "an example" not in example_lines("cispo")[0]
