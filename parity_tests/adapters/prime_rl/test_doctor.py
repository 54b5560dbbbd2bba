"""`composer-plugins doctor` on PRIME-RL's TOML: each trap in a file made for it; silence on the recipes."""

import ast
import contextlib
import inspect
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from composer_plugins import doctor
from composer_plugins.adapters import prime_rl_loss
from composer_plugins.adapters.prime_rl_parts import doctor as prime_rl_doctor
from composer_plugins.adapters.prime_rl_parts.versions import GENERATIONS
from composer_plugins.doctor import Finding, Target
from composer_plugins.errors import ConfigError
from parity_tests.support.paths import ROOT

RECIPES = sorted((ROOT / "recipes" / "prime_rl").glob("*.toml"))

APP = typer.Typer()
APP.command()(doctor.doctor)

SOUND = """
[model]
name = "Qwen/Qwen3-0.6B"

[orchestrator.algo]
type = "grpo"

[orchestrator.train]
filter_zero_advantages = false

[[orchestrator.train.source]]
name = "mine"
env.taskset.id = "my-env"

[trainer.loss]
type = "custom"
import_path = "composer_plugins.adapters.prime_rl_loss.loss_fn"

[trainer.loss.kwargs]
policy = "dppo_tv@prime-rl"
hint_weight = 0.1
replay_weight = 1
"""
FUNCTION = 'import_path = "composer_plugins.adapters.prime_rl_loss.loss_fn"'
STAMPS = ["stamp_reference", "stamp_replay_pair"]
HINT, REPLAY = "hint_weight = 0.1", "replay_weight = 1"
ECHO = (
    '"echo"\nfilter.import_path = "composer_plugins.adapters.prime_rl_echo.echo_filter"\n'
    'filter.kwargs.store = "pairs.store"\n'
)
OFF = "filter_zero_advantages = false"
FILTERS = '[[orchestrator.post_batch_filters]]\ntype = "zero_advantage"\n'


def facts(**others: Any) -> dict[str, Any]:
    """What an interpreter without PRIME-RL answers, where everything can be imported."""
    return {"prime_rl": [None, False], "package": "", "loss": None, "plugins": {"my-env": STAMPS}} | others


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Finding]]:
    """The findings in a file of this text; the interpreter is a double, unless `python` names one."""

    def found(text: str, version: str | None = None, python: str = "", **answers: Any) -> list[Finding]:
        file = tmp_path / "rl.toml"
        file.write_text(text)
        with monkeypatch.context() as patch:
            if not python:
                patch.setattr(prime_rl_doctor, "ask", lambda *_: facts(**answers))
            return list(prime_rl_doctor.examine([file], Target(python or "python", version)).findings)

    return found


def edited(*edits: tuple[str, str], more: str = "") -> str:
    text = SOUND
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return f"{text}\n{more}"


def test_a_sound_file_is_met_with_silence(find: Callable[..., list[Finding]]) -> None:
    assert find(SOUND) == []


# What is edited, the version, the key, the severity, and words that the message has.
TRAPS: dict[str, tuple[str, str | None, str, str, str]] = {
    "a colon": (
        edited(("prime_rl_loss.loss_fn", "prime_rl_loss:loss_fn")),
        None,
        "trainer.loss.import_path",
        "error",
        'has a colon import_path = "composer_plugins.adapters.prime_rl_loss.loss_fn"',
    ),
    "no import path": (
        edited((FUNCTION, "")),
        None,
        "trainer.loss.import_path",
        "error",
        "None; wanted a dotted path",
    ),
    "no dot": (
        edited((FUNCTION, 'import_path = "loss_fn"')),
        None,
        "trainer.loss.import_path",
        "error",
        "has no dot; wanted module.function",
    ),
    "an unknown kwarg": (
        edited((HINT, "hint_wieght = 0.1")),
        None,
        "trainer.loss.kwargs.hint_wieght",
        "error",
        "unknown option did you mean 'hint_weight'",
    ),
    "a kwarg of the wrong type": (
        edited((HINT, 'hint_weight = "0.1"')),
        None,
        "trainer.loss.kwargs.hint_weight",
        "error",
        "hint_weight is '0.1': input should be a valid number",
    ),
    "an unknown loss": (
        edited(("dppo_tv@prime-rl", "cipso")),
        None,
        "trainer.loss.kwargs.policy",
        "error",
        "unknown policy 'cipso' did you mean 'cispo'",
    ),
    "a loss without old_logprobs": (
        edited(("dppo_tv@prime-rl", "grpo")),
        None,
        "trainer.loss.kwargs.policy",
        "error",
        "needs old_logprobs anchor = 'rollout'",
    ),
    "what a function has chosen": (
        edited(("prime_rl_loss.loss_fn", "prime_rl_loss.cispo")),
        None,
        "trainer.loss.kwargs.policy",
        "error",
        "cispo has chosen already remove it",
    ),
    "kwargs that are no table": (
        edited(("[trainer.loss.kwargs]", "kwargs = 3\n[trainer.optim]")),
        None,
        "trainer.loss.kwargs",
        "error",
        "kwargs is 3 make it a table",
    ),
    "a kwarg beside kwargs": (
        edited((FUNCTION, FUNCTION + "\npolicy_weight = 2.0")),
        None,
        "trainer.loss.policy_weight",
        "error",
        "stands in [trainer.loss] move it to [trainer.loss.kwargs]",
    ),
    "no type": (
        edited(('type = "custom"', "")),
        None,
        "trainer.loss.type",
        "error",
        'no type beside import_path and kwargs set type = "custom"',
    ),
    "another type": (
        edited(('type = "custom"', 'type = "default"')),
        None,
        "trainer.loss.type",
        "error",
        "type 'default' beside import_path",
    ),
    "a type of ours": (
        '[trainer.loss]\ntype = "cispo"',
        None,
        "trainer.loss.type",
        "error",
        "type 'cispo'; PRIME-RL knows prime_rl_loss.cispo",
    ),
    "upstream's default": (
        '[trainer.loss]\ntype = "default"',
        None,
        "trainer.loss.type",
        "warning",
        "#3418 prime_rl_loss.dppo",
    ),
    "upstream's default of v0.8": (
        '[trainer.loss]\ntype = "default"',
        "0.8.0",
        "trainer.loss.type",
        "warning",
        "prime_rl_loss.dppo is that loss",
    ),
    "upstream's default of v0.5": (
        '[trainer.loss]\ntype = "default"',
        "0.5.0",
        "trainer.loss.type",
        "warning",
        'prime_rl_loss.loss_fn with kwargs policy = "ipo@prime-rl<0.6" is that loss',
    ),
    "upstream's default of v0.4": (
        '[trainer.loss]\ntype = "default"',
        "0.4.0",
        "trainer.loss.type",
        "warning",
        'prime_rl_loss.loss_fn with kwargs policy = "masked_is@prime-rl<0.5" is that loss',
    ),
    "a type in a list": (
        edited(('type = "custom"', 'type = ["custom"]')),
        None,
        "trainer.loss.type",
        "error",
        "type ['custom'] beside import_path and kwargs set type = \"custom\"",
    ),
    "a type that is a table": (
        "[trainer.loss]\ntype = {a = 1}",
        None,
        "trainer.loss.type",
        "error",
        "type {'a': 1}; PRIME-RL knows its own losses and prime_rl_loss.loss_fn",
    ),
    "hint options without a hint's weight": (
        edited((HINT, 'hint_estimator = "advantage"')),
        None,
        "trainer.loss.kwargs.hint_estimator",
        "error",
        "hint_weight",
    ),
    "hint numbers without a hint's weight": (
        edited((HINT, "hint_params = {}")),
        None,
        "trainer.loss.kwargs.hint_params",
        "error",
        "hint_weight",
    ),
    "pairs stamped and not weighed": (
        edited((REPLAY, "")),
        None,
        "trainer.loss.kwargs.replay_weight",
        "warning",
        "marked tokens train nothing without replay_weight [trainer.loss.kwargs] replay_weight = 1.0",
    ),
    "pairs in a store and not weighed": (
        edited((REPLAY, ""), (HINT, ""), ('"grpo"', ECHO)),
        "0.8.0",
        "trainer.loss.kwargs.replay_weight",
        "warning",
        "echo_filter marked tokens train nothing without replay_weight",
    ),
    "pairs in a store beside a hint and not weighed": (
        edited((REPLAY, ""), ('"grpo"', ECHO + 'filter.kwargs.kinds = ["replay"]')),
        None,
        "trainer.loss.kwargs.replay_weight",
        "warning",
        "marked tokens train nothing without replay_weight",
    ),
    "no loss": ("[trainer.optim]\nlr = 1e-6", None, "trainer.loss", "warning", "none of ours import_path"),
    "a loss at the top": (
        edited(("[trainer.loss.kwargs]", "[trainer.loss.kwargs]"), more='[loss]\ntype = "custom"'),
        None,
        "loss",
        "error",
        "rename it to [trainer.loss]",
    ),
    "zero advantages filtered": (
        edited((OFF, "filter_zero_advantages = true")),
        None,
        "orchestrator.train.filter_zero_advantages",
        "error",
        "true: it drops samples of advantage 0, and hint_weight = 0.1 and replay_weight = 1",
    ),
    "zero advantages filtered by default": (
        edited((OFF, ""), (HINT, "")),
        None,
        "orchestrator.train.filter_zero_advantages",
        "error",
        "not set, which is true replay_weight = 1 filter_zero_advantages = false",
    ),
    "zero advantages rejected by a gate": (
        edited(
            ("env.taskset", 'curriculum.gates.easy.type = "advantage_range"\nenv.taskset'),
        ),
        None,
        "orchestrator.train.source.curriculum.gates.easy",
        "error",
        "rejects advantages from 0.0 to 0.0 remove the gate",
    ),
    "v0.8's filter": (
        edited(('"grpo"', '"echo"\nfilter.import_path = "my.stamps"'), more=FILTERS),
        "0.8.0",
        "orchestrator.post_batch_filters.enforce",
        "error",
        "not set, which is true enforce = false",
    ),
    "v0.8's filter enforced": (
        edited(('"grpo"', '"echo"\nfilter.import_path = "my.stamps"'), more=f"{FILTERS}enforce = true"),
        "0.7.0",
        "orchestrator.post_batch_filters.enforce",
        "error",
        "enforce True enforce = false",
    ),
    "v0.8's filter by default": (
        edited(('"grpo"', '"echo"\nfilter.import_path = "my.stamps"')),
        "0.8.0",
        "orchestrator.post_batch_filters",
        "error",
        'not set zero_advantage [[orchestrator.post_batch_filters]] type = "zero_advantage", enforce = false',
    ),
    "v0.8's filter where no version is known": (
        edited((OFF, ""), more=FILTERS),
        None,
        "orchestrator.post_batch_filters.enforce",
        "error",
        "zero_advantage",
    ),
    "v0.8 without an echo filter": (
        edited(more=f"{FILTERS}enforce = false"),
        "0.8.0",
        "orchestrator.algo.type",
        "error",
        "'grpo' stamps nothing prime_rl_echo.echo_filter",
    ),
    "nothing but upstream's ref_kl": (
        edited(('"grpo"', '"opsd"'), (REPLAY, "")),
        None,
        "orchestrator.algo.type",
        "error",
        "'opsd' are trained by PRIME-RL's own ref_kl hint_weight = 0.1 does not touch them choose one",
    ),
    "upstream's ref_kl in one environment": (
        edited(more='[[orchestrator.train.source]]\nname = "other"\nalgo.type = "opd"'),
        None,
        "orchestrator.train.source.algo.type",
        "warning",
        "'opd' are trained by PRIME-RL's own ref_kl",
    ),
    "upstream's cross-entropy": (
        edited(('"grpo"', '"sft"'), (HINT, ""), (REPLAY, "")),
        None,
        "orchestrator.algo.type",
        "warning",
        "'sft' are trained by PRIME-RL's own ce, not by this loss",
    ),
    "no hint on v0.6": (
        edited((REPLAY, "")),
        "0.6.0",
        "trainer.loss.kwargs.hint_weight",
        "error",
        "0.6 lets no teacher run beside RL upgrade to 0.7",
    ),
    "no replay on v0.6": (
        edited((HINT, "")),
        "0.6.2",
        "trainer.loss.kwargs.replay_weight",
        "error",
        "0.6 has no loss_weights upgrade to 0.7",
    ),
    "a policy that learns from a reference on v0.6": (
        edited(("dppo_tv@prime-rl", "ref_kl"), (HINT, ""), (REPLAY, "")),
        "0.6.0",
        "trainer.loss.kwargs.policy",
        "error",
        "policy 'ref_kl'",
    ),
    "v0.5's denominator": (
        edited((HINT, ""), (REPLAY, "")),
        "0.5.0",
        "trainer.loss.type",
        "warning",
        "each rank's own tokens upgrade to 0.6",
    ),
    "v0.4's denominator": (
        edited((HINT, ""), (REPLAY, "")),
        "0.4.0",
        "trainer.loss.type",
        "warning",
        "the number of micro-batches upgrade to 0.6",
    ),
    "v0.4's rl": (
        edited((HINT, ""), (REPLAY, "")),
        "v0.4.0",
        "trainer.loss.type",
        "error",
        "teacher_tau trainer and orchestrator by themselves",
    ),
    "v0.5 without a teacher": (
        edited((REPLAY, "")),
        "0.5.0",
        "orchestrator.teacher_model",
        "error",
        "no teacher_model nothing fills teacher_logprobs",
    ),
    "v0.5's filter": (
        edited(
            (REPLAY, ""),
            more="[orchestrator.buffer]\nonline_difficulty_filtering = true\n[teacher_inference]",
        ),
        "0.5.0",
        "orchestrator.buffer.online_difficulty_filtering",
        "error",
        "drops samples of advantage 0 set it to false",
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_found_at_its_key_with_what_to_do(find: Callable[..., list[Finding]], name: str) -> None:
    text, version, key, severity, words = TRAPS[name]
    found = [one for one in find(text, version) if (one.key, one.severity) == (key, severity)]
    assert len(found) == 1, find(text, version)
    said = f"{found[0].what} {found[0].remedy}"
    assert all(word in said for word in words.split()), said
    assert found[0].remedy and ".." not in said and "None" not in found[0].remedy


def test_what_is_mended_is_not_complained_of(find: Callable[..., list[Finding]]) -> None:
    filters = f"{FILTERS}enforce = false"
    echo = ('"grpo"', '"echo"\nfilter.import_path = "composer_plugins.adapters.prime_rl_echo.echo_filter"')
    assert find(edited(echo, more=filters), "0.8.0") == []
    assert find(edited(echo, more='[[orchestrator.post_batch_filters]]\ntype = "gibberish"'), "0.7.0") == []
    teacher = '[orchestrator.teacher_model]\nmodel.name = "x"'
    assert [one.severity for one in find(edited((REPLAY, ""), more=teacher), "0.5.0")] == ["warning"]
    plain = edited((HINT, ""), (REPLAY, ""), (OFF, "filter_zero_advantages = true"))
    assert find(plain, plugins={"my-env": []}) == find(plain, "0.6.0") == []
    assert find(plain, "0.8.1.dev52", plugins={"my-env": []}) == []
    gate = 'curriculum.gates.easy = { type = "advantage_range", reject_min = 0.1, reject_max = 1.0 }'
    assert find(edited(("env.taskset", f"{gate}\nenv.taskset"))) == []


def test_an_echo_without_a_filter_stamps_nothing(find: Callable[..., list[Finding]]) -> None:
    found = find(edited(('"grpo"', '"echo"'), more=f"{FILTERS}enforce = false"), "0.8.0")
    assert [(one.key, one.severity) for one in found] == [("orchestrator.algo.type", "error")]


def test_the_kwargs_of_a_named_function_are_its_own_policys(find: Callable[..., list[Finding]]) -> None:
    named = ("prime_rl_loss.loss_fn", "prime_rl_loss.cispo")
    policy = 'policy = "dppo_tv@prime-rl"'
    assert find(edited(named, (policy, "policy_params.clip_high = 4.0"))) == []
    (found,) = find(edited(named, (policy, "policy_params.tv_low = 0.1")))
    assert "cispo" in found.what and "tv_low" in found.what


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["stamp_reference"], [REPLAY]),
        (["stamp_replay_pair"], ["hint_weight = 0.1"]),
        ([], ["hint_weight = 0.1", REPLAY]),
        (["stamp_from_store"], []),
        (["loss_weights", "reference_logprobs"], []),
    ],
)
def test_an_environment_whose_code_speaks_of_no_stamp_is_warned_of(
    find: Callable[..., list[Finding]], words: list[str], expected: list[str]
) -> None:
    found = find(SOUND, plugins={"my-env": words})
    assert [one.severity for one in found] == ["warning"] * len(expected)
    for one, phrase in zip(found, expected, strict=True):
        assert one.key == "orchestrator.train.source.env.taskset.id" and one.what.startswith(phrase)
        assert "'grpo' stamps nothing" in one.what and "finalize" in one.remedy


def test_an_environment_that_is_not_installed_is_warned_of(find: Callable[..., list[Finding]]) -> None:
    found = find(edited((REPLAY, "")), plugins={"my-env": None})
    assert [one.severity for one in found] == ["warning"]
    assert "my-env is not installed" in found[0].what and "--python" in found[0].remedy


def test_an_environment_that_stamps_upstreams_ref_kl_as_well_is_warned_of(
    find: Callable[..., list[Finding]],
) -> None:
    both = [*STAMPS, "ref_kl"]
    found = find(SOUND, plugins={"my-env": both})
    assert [one.severity for one in found] == ["warning"]
    assert "PRIME-RL's own ref_kl: a sample gets both" in found[0].what and "not both" in found[0].remedy
    assert find(edited((HINT, "")), plugins={"my-env": both}) == []


def test_a_trainers_own_config_has_its_loss_at_the_top(find: Callable[..., list[Finding]]) -> None:
    text = f'[loss]\ntype = "custom"\n{FUNCTION}\n[loss.kwargs]\n'
    assert find(text) == find(text, "0.6.0") == []
    assert [(one.key, one.severity) for one in find(text + "polcy = 'cispo'")] == [
        ("loss.kwargs.polcy", "error")
    ]
    assert [(one.key, one.severity) for one in find(text + HINT)] == [("loss.kwargs", "info")]
    assert not [one for one in find(text, "0.4.0") if one.severity == "error"]  # its trainer starts it


def test_stamps_that_may_be_of_hints_are_not_taken_for_pairs(find: Callable[..., list[Finding]]) -> None:
    """A store's default kinds have both; with a hint on, and no word of "replay", it is the hint's."""
    filters = f"{FILTERS}enforce = false"
    assert find(edited((REPLAY, ""), ('"grpo"', ECHO), more=filters), "0.8.0") == []
    hints = ECHO + 'filter.kwargs.kinds = ["reference"]'
    assert find(edited((REPLAY, ""), (HINT, ""), ('"grpo"', hints), more=filters), "0.8.0") == []
    assert find(edited((REPLAY, "")), plugins={"my-env": ["stamp_reference", "stamp_from_store"]}) == []
    foreign = (FUNCTION, 'import_path = "json.dumps"')
    assert find(edited((REPLAY, ""), (HINT, ""), foreign)) == []


SHAPES = ("3", '""', "[]", '["custom"]', "[{a = 1}]", "{a = 1}", "true", "nan", '"\\u0000"', "1979-05-27")
KEYS = (
    "trainer trainer.loss.type trainer.loss.import_path trainer.loss.kwargs orchestrator orchestrator.algo "
    "orchestrator.algo.type orchestrator.algo.filter orchestrator.algo.filter.import_path "
    "orchestrator.algo.filter.kwargs orchestrator.algo.filter.kwargs.kinds orchestrator.training_mode "
    "orchestrator.train orchestrator.train.source orchestrator.train.env orchestrator.env "
    "orchestrator.train.filter_zero_advantages orchestrator.post_batch_filters orchestrator.buffer "
    "orchestrator.teacher_model deployment deployment.num_teacher_gpus loss teacher_gpu_ids"
)


def test_a_value_of_any_shape_is_a_finding_or_one_error(
    find: Callable[..., list[Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [tomllib.loads(f"x = {shape}")["x"] for shape in SHAPES]
    loads, one = tomllib.loads, dict[str, Any]()
    monkeypatch.setattr(tomllib, "loads", lambda _: one)
    inside = [f"trainer.loss.kwargs.{name}" for name in ("policy", "hint_weight", "hint_params", "clip")]
    for key in [*KEYS.split(), *inside]:
        for shape in shapes:
            for version in ("0.5.0", "0.6.0", "0.8.0", None):
                one = loads(edited(('"grpo"', ECHO)))
                *tables, last = key.split(".")
                holder = one
                for name in tables:
                    holder = holder.setdefault(name, {})
                holder[last] = shape
                with contextlib.suppress(ConfigError):
                    find("", version)


def test_a_training_mode_of_another_shape_is_found(find: Callable[..., list[Finding]]) -> None:
    text = edited(("[orchestrator.algo]", "[orchestrator]\ntraining_mode = ['opd']\n[orchestrator.algo]"))
    found = [one for one in find(text, "0.6.0") if one.key == "orchestrator.training_mode"]
    assert [one.severity for one in found] == ["error"]
    assert "['opd']" in found[0].what and found[0].remedy


def test_a_loss_of_somebody_elses_is_looked_up_and_its_kwargs_left_alone(
    find: Callable[..., list[Finding]],
) -> None:
    text = edited((FUNCTION, 'import_path = "json.dumps"'), (HINT, "anything = [1, {a = 2}]"))
    assert find(text) == [] == find(text, package="No module named 'composer_plugins'")


def test_several_files_are_merged_from_left_to_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prime_rl_doctor, "ask", lambda *_: facts())
    base, over = tmp_path / "rl.toml", tmp_path / "mine.toml"
    base.write_text(SOUND)
    over.write_text(
        "[orchestrator.train]\nfilter_zero_advantages = true\n[trainer.loss.kwargs]\nhint_weight = 0"
    )
    target = Target("python", None)
    found = prime_rl_doctor.examine([base, over], target).findings
    assert [one.key for one in found] == ["orchestrator.train.filter_zero_advantages"]
    assert "replay_weight" in found[0].what and "hint_weight" not in found[0].what
    assert prime_rl_doctor.examine([over, base], target).findings == ()


@pytest.mark.parametrize(
    ("release", "later", "since"),
    [
        ("0.4.0", False, "0.4"),
        ("v0.5.0", False, "0.5"),
        ("0.5.1.dev12", False, "0.5"),
        ("0.6.0", False, "0.6"),
        ("0.7", False, "0.7"),
        ("0.8.0", False, "0.7"),
        ("0.8.1.dev51", False, "0.7"),
        ("0.8.1.dev52+gabc", False, "0.8.1.dev52"),
        ("0.8.1", False, "0.8.1.dev52"),
        ("0.9", False, "0.8.1.dev52"),
        ("HEAD", False, "0.8.1.dev52"),
        ("0.8.0", True, "0.8.1.dev52"),
        (None, False, "0.8.1.dev52"),
    ],
)
def test_each_release_has_the_contract_of_its_generation(
    release: str | None, later: bool, since: str
) -> None:
    assert prime_rl_doctor.generation_of(release, later).since == since
    assert {one.since for one in GENERATIONS} >= {since}


def test_the_version_that_is_told_wins_over_the_one_installed(find: Callable[..., list[Finding]]) -> None:
    text = edited((REPLAY, ""))
    assert [one.severity for one in find(text, None, prime_rl=["0.6.0", False])] == ["error"]
    hints = {"my-env": ["stamp_reference"]}
    assert find(text, "HEAD", prime_rl=["0.6.0", False], plugins=hints) == []


@pytest.mark.parametrize(
    ("text", "version", "words"),
    [
        ("[trainer.loss\n", None, "rl.toml: not TOML: line"),
        ("[project]\nname = 'x'", None, "no config of PRIME-RL's [trainer] [loss]"),
        ("[trainer]\nloss = 3", None, "trainer.loss is 3; wanted a table"),
        (SOUND, "0.3.0", "takes no custom loss wanted 0.5 or later"),
        (SOUND, "", "'' is no version; wanted 0.8.0"),
        (SOUND, "newest", "'newest' is no version; wanted 0.8.0"),
    ],
)
def test_what_cannot_be_examined_is_one_error(
    find: Callable[..., list[Finding]], text: str, version: str | None, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        find(text, version)
    assert all(word in str(error.value) for word in words.split())
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_or_of_no_framework_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.toml: cannot be read: No such file"):
        prime_rl_doctor.read([tmp_path / "nowhere.toml"])
    with pytest.raises(ConfigError, match=r"a.yaml: by its suffix no config .* --framework"):
        doctor.choose(None, [Path("a.yaml")])
    with pytest.raises(ConfigError, match="unknown framework 'prime_rl': did you mean 'prime-rl'"):
        doctor.choose("prime_rl", [Path("a.toml")])
    assert doctor.choose("prime-rl", [Path("a.cfg")]) == "prime-rl"


# --- the interpreter that will train ---------------------------------------------------------------------


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of every interpreter that is asked."""
    folder = tmp_path / "modules"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "__init__.py").write_text("")
    (folder / "pkg" / "mod.py").write_text(
        "print('noise')\nclass Loss:\n    def step(inputs): ...\ndef loss_fn(inputs): ...\nnumber = 3\n"
    )
    (folder / "pkg" / "broken.py").write_text("import not_there_at_all")
    (folder / "my_env.py").write_text("def finalize(): stamp_reference()\nx = {'ref_kl': 1}")
    old = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), str(ROOT), old])))
    return folder


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("pkg.nowhere.fn", "has no module pkg.nowhere correct the path"),
        ("nowhere.mod.fn", "has no module nowhere"),
        ("pkg.mod.los_fn", "the module pkg.mod has no 'los_fn' did you mean 'loss_fn'"),
        ("pkg.mod.number", "is a int; wanted a function"),
        ("pkg.mod.Loss.step", "pkg.mod.Loss is no module step = Loss().step"),
        ("pkg.broken.fn", "importing pkg.broken fails No module named 'not_there_at_all'"),
        ("composer_plugins.adapters.prime_rl_loss", "wanted a function"),
        ("composer_plugins.adapters.prime_rl_loss.cipso", "did you mean 'cispo'"),
    ],
)
def test_an_import_path_is_looked_up_as_prime_rl_does(
    find: Callable[..., list[Finding]], modules: Path, path: str, words: str
) -> None:
    if path == "composer_plugins.adapters.prime_rl_loss":
        words = "the module composer_plugins.adapters has no 'prime_rl_loss'"
    text = f'[trainer.loss]\ntype = "custom"\nimport_path = "{path}"'
    found = find(text, python=sys.executable)
    assert [(one.key, one.severity) for one in found] == [("trainer.loss.import_path", "error")]
    said = f"{found[0].what} {found[0].remedy}"
    assert all(word in said for word in words.split()), said


def test_import_paths_that_resolve_are_met_with_silence(
    find: Callable[..., list[Finding]], modules: Path
) -> None:
    for path in ("pkg.mod.loss_fn", "composer_plugins.adapters.prime_rl_loss.cispo"):
        assert find(f'[trainer.loss]\ntype = "custom"\nimport_path = "{path}"', python=sys.executable) == []


def test_an_environments_source_is_read_without_importing_it(
    find: Callable[..., list[Finding]], modules: Path
) -> None:
    (modules / "my_env.py").write_text(
        "raise SystemExit\ndef finalize(): stamp_reference()\nx = {'ref_kl': 1}"
    )
    found = find(edited((FUNCTION, 'import_path = "pkg.mod.loss_fn"')), python=sys.executable)
    assert found == []  # of a loss that is not ours, nothing is known
    found = find(SOUND, python=sys.executable)
    assert [one.what.partition(",")[0] for one in found] == [REPLAY, "hint_weight = 0.1"]
    assert "ref_kl" in found[1].what


def test_names_that_nothing_can_be_looked_up_by_are_no_traceback(
    find: Callable[..., list[Finding]], modules: Path
) -> None:
    (modules / "raises").mkdir()
    (modules / "raises" / "__init__.py").write_text("raise SystemExit('imported')")
    found = find(edited(("my-env", "raises.env"), (REPLAY, "")), python=sys.executable)
    assert [one.severity for one in found] == ["warning"]
    assert "raises.env is not installed" in found[0].what
    with pytest.raises(ConfigError, match="cannot be asked: embedded null byte"):
        find(edited(("prime_rl_loss.loss_fn", "\\u0000.loss_fn")), python=sys.executable)


def test_an_interpreter_without_this_package_is_found(
    find: Callable[..., list[Finding]], tmp_path: Path
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\ncd / && exec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    found = find(edited((HINT, ""), (REPLAY, "")), python=str(bare))
    assert [(one.key, one.severity) for one in found] == [("trainer.loss.import_path", "error")]
    assert f"cannot be imported by {bare}" in found[0].what
    assert f"uv pip install --python {bare} composer-plugins" in found[0].remedy


def test_what_is_no_interpreter_is_one_error(find: Callable[..., list[Finding]]) -> None:
    with pytest.raises(ConfigError, match=r"--python /nowhere/python: cannot be run: No such file"):
        find(SOUND, python="/nowhere/python")
    with pytest.raises(ConfigError, match=r"--python /bin/true: no Python that can be asked \(status 0"):
        find(SOUND, python="/bin/true")


def test_the_installed_version_is_read_and_that_of_the_newest_told_from_0_8_0(
    find: Callable[..., list[Finding]], modules: Path
) -> None:
    info = modules / "prime_rl-0.8.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prime-rl\nVersion: 0.8.0\n")
    (modules / "prime_rl" / "configs").mkdir(parents=True)
    (modules / "prime_rl" / "__init__.py").write_text("raise SystemExit('imported')")
    source = modules / "prime_rl" / "configs" / "orchestrator.py"
    source.write_text("post_batch_filters: list = []")
    text = edited((HINT, ""))
    (modules / "my_env.py").write_text("stamp_replay_pair()")
    keys = {one.key for one in find(text, python=sys.executable)}
    assert keys == {"orchestrator.post_batch_filters", "orchestrator.algo.type"}
    source.write_text("filter_zero_advantages: bool = True")
    assert find(text, python=sys.executable) == []


# --- the command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_doctor_is_silent_on_every_recipe(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(recipe.parent), str(ROOT)]))
    run = CliRunner().invoke(APP, [str(recipe)], catch_exceptions=False)
    assert run.exit_code == 0
    assert run.output.count("\n") == 1 and ": nothing found, against the contract of PRIME-RL" in run.output


def test_the_exit_status_is_1_for_an_error_and_0_for_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rl.toml"
    monkeypatch.setattr(prime_rl_doctor, "ask", lambda *_: facts(plugins={"my-env": ["stamp_reference"]}))
    file.write_text(edited((REPLAY, "replay_weight = 2.5")))
    run = CliRunner().invoke(APP, [str(file)], catch_exceptions=False)
    assert run.exit_code == 0
    assert "warning: orchestrator.train.source.env.taskset.id\n  replay_weight = 2.5, and" in run.output
    assert f"\n{file}: 1 warning, against" in run.output
    file.write_text(edited((REPLAY, "replay_weight = 2.5"), (OFF, "")))
    run = CliRunner().invoke(APP, [str(file)], catch_exceptions=False)
    assert run.exit_code == 1
    assert run.output.startswith("error: orchestrator.train.filter_zero_advantages\n")
    assert "  -> [orchestrator.train] filter_zero_advantages = false\n" in run.output
    assert ": 1 error, 1 warning, against" in run.output


@pytest.mark.parametrize(
    ("arguments", "status", "stream", "words"),
    [
        (["nowhere.toml"], 2, "stderr", "error: nowhere.toml: cannot be read"),
        (["broken.toml"], 2, "stderr", "error: broken.toml: not TOML"),
        (["x.toml", "--framework", "nemo"], 2, "stderr", "error: unknown framework 'nemo'; known: prime-rl"),
        (["colon.toml"], 1, "stdout", "error: trainer.loss.import_path"),
    ],
)
def test_the_installed_command_ends_with_its_status(
    tmp_path: Path, arguments: list[str], status: int, stream: str, words: str
) -> None:
    (tmp_path / "broken.toml").write_text("[trainer")
    (tmp_path / "colon.toml").write_text(edited(("prime_rl_loss.loss_fn", "prime_rl_loss:loss_fn")))
    command = [sys.executable, "-m", "composer_plugins", "doctor", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == status
    assert getattr(run, stream).startswith(words) and "Traceback" not in run.stderr


def test_json_has_every_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rl.toml"
    monkeypatch.setattr(prime_rl_doctor, "ask", lambda *_: facts())
    file.write_text(edited((OFF, "")))
    run = CliRunner().invoke(APP, [str(file), "--json", "--version", "HEAD"], catch_exceptions=False)
    told = json.loads(run.output)
    assert run.exit_code == 1
    assert told["framework"] == "prime-rl" and told["files"] == [str(file)] and "HEAD" in told["against"]
    (found,) = told["findings"]
    assert found["key"] == "orchestrator.train.filter_zero_advantages" and found["severity"] == "error"
    assert found["what"] and found["remedy"]


def test_the_doctor_knows_what_each_named_function_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prime_rl_loss, "loss_fn", lambda _, **kwargs: kwargs)
    named = {
        name: function(None)
        for name, function in vars(prime_rl_loss).items()
        if inspect.isfunction(function)
        and function.__module__ == prime_rl_loss.__name__
        and not name.startswith("_")
    }
    assert named == {name: kwargs for name, kwargs in prime_rl_doctor.FUNCTIONS.items() if name != "loss_fn"}


def test_the_doctor_loads_neither_torch_nor_prime_rl(tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text(SOUND)
    program = (
        "import sys; from pathlib import Path\n"
        "from composer_plugins.adapters.prime_rl_parts import doctor as d\n"
        f"d.ask = lambda *_: {facts()!r}\n"
        f"assert d.examine([Path({str(file)!r})], d.Target('python', None)).findings == ()\n"
        "print(*sys.modules)"
    )
    loaded = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split()
    assert not {"torch", "numpy", "prime_rl", "verifiers"} & set(loaded)


def test_the_probe_needs_nothing_but_the_standard_library() -> None:
    tree = ast.parse((ROOT / "adapters" / "prime_rl_parts/probe.py").read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    assert {str(name).partition(".")[0] for name in names} <= sys.stdlib_module_names
