"""`composer-plugins doctor` on PRIME-RL's TOML: each mistake in a file of its own; nothing in the recipes."""

import ast
import contextlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from composer_plugins.adapters.prime_rl_plugin import doctor as prime_rl_doctor
from composer_plugins.adapters.prime_rl_plugin import upstream
from composer_plugins.adapters.prime_rl_plugin.store import StoreWriter
from composer_plugins.cli import app
from composer_plugins.diagnosis import Target
from composer_plugins.errors import ConfigError
from composer_plugins.findings import Finding
from composer_plugins.frameworks import prime_rl
from parity_tests.rigs.paths import ROOT

Find = Callable[..., list[Finding]]
RECIPES = sorted((ROOT / "recipes" / "prime_rl").glob("*.toml"))

SOUND = """
[model]
name = "Qwen/Qwen3-0.6B"

[orchestrator]
group_size = 8

[orchestrator.algo]
type = "grpo"

[orchestrator.train]
filter_zero_advantages = false

[[orchestrator.train.source]]
name = "mine"
env.taskset.id = "my-env"

[trainer.loss]
type = "custom"
import_path = "composer_plugins.adapters.prime_rl_plugin.loss_fn"

[trainer.loss.kwargs]
policy = "dppo_tv@prime-rl"
hint_weight = 0.1
replay_weight = 1
"""
FUNCTION = 'import_path = "composer_plugins.adapters.prime_rl_plugin.loss_fn"'
STAMPS = ["stamp_reference", "stamp_replay_pair"]
POLICY = 'policy = "dppo_tv@prime-rl"'
HINT, REPLAY = "hint_weight = 0.1", "replay_weight = 1"
ECHO = (
    '"echo"\nfilter.import_path = "composer_plugins.adapters.prime_rl_plugin.stored_stamps.echo_filter"\n'
    'filter.kwargs.store = "pairs.store"\n'
)
SIZE = "group_size = 8"
OFF = "filter_zero_advantages = false"
SOURCE = '[[orchestrator.train.source]]\nname = "mine"\nenv.taskset.id = "my-env"\n'
FILTERS = '[[orchestrator.post_batch_filters]]\ntype = "zero_advantage"\n'


ABSENT = [None] * len(prime_rl.FEATURES)  # no source was found


def facts(**others: Any) -> dict[str, Any]:
    """What an interpreter without PRIME-RL answers, where everything can be imported."""
    return {
        "prime_rl": [None, ABSENT],
        "only_in": "",
        "package": "",
        "loss": None,
        "filters": {},
        "rejected": None,
        "plugins": {"my-env": STAMPS},
    } | others


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Find:
    """The findings in a file of this text; the interpreter is a double, unless `python` names one."""

    StoreWriter(tmp_path / "pairs.store").close()
    monkeypatch.chdir(tmp_path)

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


def test_nothing_is_found_in_a_sound_file(find: Find) -> None:
    assert find(SOUND) == []


# What is edited, the severity and the key of what is found, words of it, and the version.
MISTAKES: list[tuple[str, ...]] = [
    (
        edited(("prime_rl_plugin.loss_fn", "prime_rl_plugin:loss_fn")),
        "error trainer.loss.import_path",
        'has a colon import_path = "composer_plugins.adapters.prime_rl_plugin.loss_fn"',
    ),
    (edited((FUNCTION, "")), "error trainer.loss.import_path", "None, not a dotted path"),
    (
        edited((FUNCTION, 'import_path = "loss_fn"')),
        "error trainer.loss.import_path",
        "has no dot write module.function",
    ),
    (
        edited((FUNCTION, 'import_path = "composer_plugins.kernels.policy.grpo"')),
        "error trainer.loss.import_path",
        'cannot be called with PRIME-RL\'s LossInputs prime_rl_plugin.loss_fn" and kwargs.policy = "grpo"',
    ),
    (
        edited(("prime_rl_plugin.loss_fn", "prime_rl_plugin.stamps.stamp_reference")),
        "error trainer.loss.import_path",
        "stamps.stamp_reference' cannot be called set import_path = prime_rl_plugin.loss_fn\"",
    ),
    (
        edited((HINT, "hint_wieght = 0.1")),
        "error trainer.loss.kwargs.hint_wieght",
        "unknown option 'hint_wieght' did you mean 'hint_weight'",
    ),
    (
        edited(("prime_rl_plugin.loss_fn", "prime_rl_plugin.cispo")),
        "error trainer.loss.kwargs.policy",
        "function cispo has chosen 'cispo' already remove it",
    ),
    (
        edited((POLICY, 'policy = "gspo"\nold_policy = "rollout"')),
        "warning trainer.loss.kwargs.policy",
        "'gspo' seq-mean-token-mean divides by the tokens of the global batch expect",
    ),
    (
        edited(("[trainer.loss.kwargs]", "kwargs = 3\n[trainer.optim]")),
        "error trainer.loss.kwargs",
        "it is 3 make it a table",
    ),
    (
        edited((FUNCTION, FUNCTION + "\npolicy_weight = 2.0")),
        "error trainer.loss.policy_weight",
        "[trainer.loss] has no such option move it to [trainer.loss.kwargs]",
    ),
    (
        edited(('type = "custom"', "")),
        "error trainer.loss.type",
        'there is no type only type = "custom" reads import_path and kwargs set',
    ),
    (
        edited(('type = "custom"', 'type = "default"')),
        "error trainer.loss.type",
        "it is 'default', and only reads import_path",
    ),
    (
        '[trainer.loss]\ntype = "gspo"',
        "error trainer.loss.type",
        "it is 'gspo', and PRIME-RL has prime_rl_plugin.gspo",
    ),
    (
        '[trainer.loss]\ntype = "default"',
        "warning trainer.loss.type",
        '#3418 prime_rl_plugin.dppo", which is that loss',
    ),
    (
        '[trainer.loss]\ntype = "default"',
        "warning trainer.loss.type",
        'prime_rl_plugin.loss_fn" and kwargs.policy = "ipo@prime-rl<0.6", which is that loss',
        "0.5.0",
    ),
    (
        '[trainer.loss]\ntype = "default"',
        "warning trainer.loss.type",
        'prime_rl_plugin.loss_fn" and kwargs.policy = "masked_is@prime-rl<0.5", which is that loss',
        "0.4.0",
    ),
    (
        edited((FUNCTION, FUNCTION + "\nkl_tau = 0.5")),
        "error trainer.loss.kl_tau",
        "set policy_params = { kl_tau = 0.5 } in [trainer.loss.kwargs]",
    ),
    (
        edited((FUNCTION, FUNCTION + "\ndppo_mask_high = 10.0")),
        "error trainer.loss.dppo_mask_high",
        "set policy_params = { tv_high = 10.0 } in [trainer.loss.kwargs] masks nothing",
    ),
    (
        edited((FUNCTION, FUNCTION + "\nhint_wieght = 0.5")),
        "error trainer.loss.hint_wieght",
        "loss_fn has no such option either remove it, or set hint_weight in [trainer.loss.kwargs]",
    ),
    (
        edited((POLICY, POLICY + "\ndppo_mask_low = 0.1")),
        "error trainer.loss.kwargs.dppo_mask_low",
        "set policy_params = { tv_low = 0.1 }",
    ),
    (
        '[trainer.loss]\ntype = "default"\ndppo_mask_high = 10.0\nkl_tau = 0.0',
        "warning trainer.loss.type",
        'prime_rl_plugin.dppo" kwargs.policy_params = { tv_high = 10.0, kl_tau = 0.0 }, which is that loss',
        "0.6.0",
    ),
    (
        '[trainer.loss]\ntype = "default"\ndppo_mask_high = 0.3',
        "error trainer.loss.type",
        "PRIME-RL after #3586 has no loss of this type kwargs.policy_params = { tv_high = 0.3 }",
        "0.9.0",
    ),
    (
        "[trainer.loss]\nkl_tau = 0.0",
        "warning trainer.loss.type",
        "'default' is PRIME-RL's own loss kwargs.policy_params = { kl_tau = 0.0 }, which is that loss",
        "0.8.0",
    ),
    (
        "[trainer.loss]\neps = 0.2",
        "warning trainer.loss.type",
        "'ipo' is PRIME-RL's own loss tv_low = 0.2 which is that loss",
        "0.9.0",
    ),
    (
        '[trainer.loss]\ntype = "default"\ndppo_mask_hihg = 0.3',
        "error trainer.loss.dppo_mask_hihg",
        "'default' has no such option in PRIME-RL 0.6 to 559b447 did you mean 'dppo_mask_high'?",
        "0.8.0",
    ),
    (
        '[trainer.loss]\ntype = "default"\nipo_mask_low = 0.3',
        "error trainer.loss.ipo_mask_low",
        "has no such option in PRIME-RL 0.6 'default' (0.5) has this option or set --version",
        "0.8.0",
    ),
    (
        '[trainer.loss]\ntype = "default"\ndppo_mask_high = "0.3"\nkl_tau = 0.1',
        "error trainer.loss.dppo_mask_high",
        "it is '0.3' set a value like PRIME-RL's 0.2",
        "0.8.0",
    ),
    (
        '[trainer.loss]\ntype = "default"\nteacher_tau = "0.3"\nkl_tau = true',
        "error trainer.loss.teacher_tau",
        "it is '0.3' set a value like PRIME-RL's 0.0",
        "0.5.0",
    ),
    (
        '[trainer.loss]\ntype = "ipo"\nscore_centering = 1',
        "error trainer.loss.score_centering",
        "it is 1 set a value like PRIME-RL's false",
        "0.9.0",
    ),
    (
        '[trainer.loss]\ntype = "ppo"\nratio_high = 1.3\nmax_importance_ratio = 10.0',
        "warning trainer.loss.type",
        'kwargs.policy = "ppo" clip_high = 0.3 weight_cap = 10.0 }, which is that loss',
        "0.9.0",
    ),
    (
        '[trainer.loss]\ntype = "ppo"\nratio_low = 1.5',
        "warning trainer.loss.type",
        "which is that loss, except that ratio_low = 1.5 is left out: clip_low would be -0.5",
        "0.9.0",
    ),
    (
        '[trainer.loss]\ntype = "ipo"\nipo_treshold = 0.2',
        "warning trainer.loss.type",
        "which is that loss, except that ipo_treshold is left out",
        "0.8.0",
    ),
    (
        '[trainer.loss]\ntype = "ipo"\nscore_centering = true',
        "warning trainer.loss.type",
        'kwargs.policy = "ipo_centered" ratio_cap = 10000.0 kl_tau = 0.0 }, which is that loss',
        "0.9.0",
    ),
    (
        edited((POLICY, 'policy = "ipo_centered"'), (HINT, ""), (REPLAY, "")),
        "warning inference.enable_return_sampling_mask_logprobs",
        "not true, so policy 'ipo_centered' gets none of the log-probabilities set it to true, and top_p",
        "0.9.0",
    ),
    (
        '[trainer.loss]\ntype = "cispo"',
        "error trainer.loss.type",
        'PRIME-RL 0.7 has no loss of this type: PRIME-RL after #3586 has it kwargs.policy = "cispo"',
        "0.8.0",
    ),
    (
        edited(more="[trainer.kwargs]\nhint_weight = 0.1"),
        "error trainer.kwargs",
        "PRIME-RL has no such table rename it to [trainer.loss.kwargs]",
    ),
    (
        edited(more="[kwargs]\nhint_weight = 0.1"),
        "error kwargs",
        "does not reach the loss rename it to [trainer.loss.kwargs]",
    ),
    (
        edited((POLICY, 'policy = "cispo"\nold_policy = "current"')),
        "warning trainer.loss.kwargs.old_policy",
        "'cispo' is 1 at every token clip_high, clip_low, log_ratio_clamp cannot limit set old_policy",
    ),
    (
        edited((HINT, "policy_weight = 0"), (REPLAY, "")),
        "error trainer.loss.kwargs.policy_weight",
        "it is 0, and so are the other weights: nothing trains set policy_weight,",
    ),
    (
        edited((POLICY, 'policy = "gspo"\nold_policy = "rollout"\nhint_estimator = "advantage"')),
        "error trainer.loss.kwargs.hint_estimator",
        "'gspo' averages them set 'score', gspo_token",
    ),
    (
        "[trainer.loss]\ntype = {a = 1}",
        "error trainer.loss.type",
        "it is {'a': 1}, and PRIME-RL has its own losses prime_rl_plugin.loss_fn",
    ),
    (
        edited((HINT, 'hint_estimator = "advantage"')),
        "error trainer.loss.kwargs.hint_estimator",
        "hint_weight",
    ),
    (
        edited((REPLAY, "")),
        "warning trainer.loss.kwargs.replay_weight",
        "stamps pairs, and their tokens train nothing set replay_weight = 1.0 in [trainer.loss.kwargs],",
    ),
    (
        edited((REPLAY, ""), (HINT, ""), ('"grpo"', ECHO)),
        "warning trainer.loss.kwargs.replay_weight",
        "echo_filter stamps pairs tokens train nothing without replay_weight",
        "0.8.0",
    ),
    (
        edited((REPLAY, ""), ('"grpo"', ECHO + 'filter.kwargs.kinds = ["replay"]')),
        "warning trainer.loss.kwargs.replay_weight",
        "tokens train nothing without replay_weight",
    ),
    (
        "[trainer.optim]\nlr = 1e-6",
        "warning trainer.loss",
        "there is no such table, so PRIME-RL trains with its own loss import_path",
    ),
    (
        edited(("[trainer.loss.kwargs]", "[trainer.loss.kwargs]"), more='[loss]\ntype = "custom"'),
        "error loss",
        "rename it to [trainer.loss]",
    ),
    (
        edited((OFF, "filter_zero_advantages = true")),
        "error orchestrator.train.filter_zero_advantages",
        "it is true, and it drops samples of advantage 0, and hint_weight = 0.1 and replay_weight = 1",
    ),
    (
        edited((OFF, ""), (HINT, "")),
        "error orchestrator.train.filter_zero_advantages",
        "not set, which means true, replay_weight = 1 filter_zero_advantages = false",
    ),
    (
        edited(("env.taskset", 'curriculum.gates.easy.type = "advantage_range"\nenv.taskset')),
        "error orchestrator.train.source.curriculum.gates.easy",
        "rejects advantages from 0.0 to 0.0 remove the gate",
    ),
    (
        edited(('"grpo"', '"echo"\nfilter.import_path = "my.stamps"'), more=FILTERS),
        "error orchestrator.post_batch_filters.enforce",
        "not set, which means true enforce = false",
        "0.8.0",
    ),
    (
        edited(('"grpo"', '"echo"\nfilter.import_path = "my.stamps"'), more=f"{FILTERS}enforce = true"),
        "error orchestrator.post_batch_filters.enforce",
        "it is True enforce = false",
        "0.7.0",
    ),
    (
        edited(('"grpo"', '"echo"\nfilter.import_path = "my.stamps"')),
        "error orchestrator.post_batch_filters",
        'not set, zero_advantage [[orchestrator.post_batch_filters]] with type = "zero_advantage", enforce',
        "0.8.0",
    ),
    (edited((OFF, ""), more=FILTERS), "error orchestrator.post_batch_filters.enforce", "zero_advantage"),
    (
        edited(more=f"{FILTERS}enforce = false"),
        "error orchestrator.algo.type",
        "'grpo' stamps nothing stored_stamps.echo_filter",
        "0.8.0",
    ),
    (
        edited(('"grpo"', '"opsd"'), (REPLAY, "")),
        "error orchestrator.algo.type",
        "trains the samples of 'opsd' with its own ref_kl, hint_weight = 0.1 has no effect choose one",
    ),
    (
        edited(more='[[orchestrator.train.source]]\nname = "other"\nalgo.type = "opd"'),
        "warning orchestrator.train.source.algo.type",
        "trains the samples of 'opd' with its own ref_kl,",
    ),
    (
        edited(('"grpo"', '"sft"'), (HINT, ""), (REPLAY, "")),
        "warning orchestrator.algo.type",
        "trains the samples of 'sft' with its own ce, not with this loss",
    ),
    (
        edited((REPLAY, "")),
        "error trainer.loss.kwargs.hint_weight",
        "0.6 allows no teacher beside RL upgrade to 0.7",
        "0.6.0",
    ),
    (
        edited((HINT, "")),
        "error trainer.loss.kwargs.replay_weight",
        "0.6 has no weights upgrade to 0.7",
        "0.6.2",
    ),
    (
        edited(("dppo_tv@prime-rl", "ref_kl"), (HINT, ""), (REPLAY, "")),
        "error trainer.loss.kwargs.policy",
        "policy 'ref_kl'",
        "0.6.0",
    ),
    (
        edited((HINT, ""), (REPLAY, "")),
        "warning trainer.loss.type",
        "each rank's own tokens upgrade to 0.6",
        "0.5.0",
    ),
    (
        edited((HINT, ""), (REPLAY, "")),
        "warning trainer.loss.type",
        "the number of micro-batches upgrade to 0.6",
        "0.4.0",
    ),
    (
        edited((HINT, ""), (REPLAY, "")),
        "error trainer.loss.type",
        "teacher_tau trainer and orchestrator by themselves",
        "v0.4.0",
    ),
    (
        edited((REPLAY, "")),
        "error orchestrator.teacher_model",
        "without a teacher_model nothing fills teacher_logprobs",
        "0.5.0",
    ),
    (
        edited(
            (REPLAY, ""),
            more="[orchestrator.buffer]\nonline_difficulty_filtering = true\n[teacher_inference]",
        ),
        "error orchestrator.buffer.online_difficulty_filtering",
        "it drops samples of advantage 0, set it to false",
        "0.5.0",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[1])
def test_a_mistake_is_found_at_its_key_with_what_to_do(find: Find, mistake: tuple[str, ...]) -> None:
    text, at, words, *version = mistake
    findings = find(text, *version)
    found = [one for one in findings if f"{one.severity} {one.key}" == at]
    assert len(found) == 1, findings
    text = f"{found[0].problem} {found[0].remedy}"
    assert all(word in text for word in words.split()), text
    assert found[0].remedy and ".." not in text and "None" not in found[0].remedy


def test_what_is_corrected_is_not_reported(find: Find) -> None:
    filters = f"{FILTERS}enforce = false"
    echo = ('"grpo"', ECHO)
    assert find(edited(echo, more=filters), "0.8.0") == []
    assert find(edited(echo, more='[[orchestrator.post_batch_filters]]\ntype = "gibberish"'), "0.7.0") == []
    teacher = '[orchestrator.teacher_model]\nmodel.name = "x"'
    assert [one.severity for one in find(edited((REPLAY, ""), more=teacher), "0.5.0")] == ["warning"]
    plain = edited((HINT, ""), (REPLAY, ""), (OFF, "filter_zero_advantages = true"))
    assert find(plain, plugins={"my-env": []}) == find(plain, "0.6.0") == []
    assert find(plain, "0.8.1.dev52", plugins={"my-env": []}) == []
    gate = 'curriculum.gates.easy = { type = "advantage_range", reject_min = 0.1, reject_max = 1.0 }'
    assert find(edited(("env.taskset", f"{gate}\nenv.taskset"))) == []


OWN_SIZE = 'name = "mine"'


@pytest.mark.parametrize(
    ("edits", "version", "key", "words"),
    [
        ([(SIZE, "group_size = 1")], None, "orchestrator.group_size", "it is 1, 'grpo' and only hint_weight"),
        ([(SIZE, "")], None, "orchestrator.group_size", "it is not set, which means 1, and 'grpo' subtracts"),
        ([(SIZE, "")], "0.5.0", "orchestrator.rollouts_per_example", "not set, 'grpo' every advantage is 0"),
        ([(SIZE, "rollouts_per_example = 1")], "0.5.0", "orchestrator.rollouts_per_example", "it is 1,"),
        (
            [("[orchestrator.algo]", ""), ('type = "grpo"', ""), (SIZE, "advantage.type = 'default'")],
            "0.6.0",
            "orchestrator.group_size",
            "it is not set, which means 1, and 'default'",
        ),
        ([('"grpo"', '"max_rl"'), (SIZE, "")], "0.7.0", "orchestrator.group_size", "'max_rl' subtracts"),
        (
            [(OWN_SIZE, OWN_SIZE + "\ngroup_size = 1")],
            None,
            "orchestrator.train.source.group_size",
            "it is 1",
        ),
    ],
)
def test_a_group_of_one_completion_is_warned_of(
    find: Find, edits: list[tuple[str, str]], version: str | None, key: str, words: str
) -> None:
    text = SOUND
    for old, new in edits:
        text = text.replace(old, new)
    found = [one for one in find(text, version) if "every advantage is 0" in one.problem]
    assert [(one.severity, one.key) for one in found] == [("warning", key)]
    assert all(word in found[0].problem for word in words.split()) and "2 or more" in found[0].remedy


def test_prime_rl_drops_groups_of_one_completion_and_ends(find: Find) -> None:
    plain = edited((HINT, ""), (REPLAY, ""), (SIZE, ""), (OFF, ""))
    for version, is_dropped in ((None, True), ("0.8.0", True), ("0.6.0", True), ("0.5.0", False)):
        (found,) = [one for one in find(plain, version) if "every advantage is 0" in one.problem]
        assert ("ends after 10 empty batches" in found.problem) is is_dropped
    (found,) = find(edited((HINT, ""), (REPLAY, ""), (SIZE, "")), plugins={"my-env": []})
    assert found.problem.endswith("every advantage is 0")


@pytest.mark.parametrize(
    ("edits", "version"),
    [
        ([(SIZE, ""), ('"grpo"', '"rae"')], None),
        ([(SIZE, ""), ('"grpo"', '"opsd"')], None),
        ([(SIZE, "training_mode = 'opd'")], "0.6.0"),
        ([(SIZE, "advantage.type = 'custom'"), ("[orchestrator.algo]", ""), ('type = "grpo"', "")], "0.6.0"),
        ([(SIZE, "advantage = 'None'"), ("[orchestrator.algo]", ""), ('type = "grpo"', "")], "0.5.0"),
        ([(SIZE, ""), (OWN_SIZE, OWN_SIZE + "\ngroup_size = 4")], None),
        ([(SIZE, ""), (HINT, HINT + "\npolicy_weight = 0")], None),
        ([(SIZE, ""), ("dppo_tv@prime-rl", "ref_kl")], None),
        ([(SIZE, ""), (FUNCTION, 'import_path = "json.dumps"')], None),
    ],
)
def test_a_group_of_one_completion_that_trains_is_not_warned_of(
    find: Find, edits: list[tuple[str, str]], version: str | None
) -> None:
    found = find(edited(*edits), version)
    assert [one for one in found if "every advantage is 0" in one.problem] == []


@pytest.mark.parametrize(
    ("kwargs", "severity", "key", "words"),
    [
        ("sotre = 'a'", "error", "sotre", "unknown option 'sotre' did you mean 'store'"),
        ("kinds = ['reference']", "error", "store", "it is not set the path of the store"),
        ("store = 3", "error", "store", "it is 3"),
        (
            "store = 'nowhere.store'",
            "warning",
            "store",
            "'nowhere.store' cannot be read here: there is no store",
        ),
        (
            "store = '{file}'",
            "warning",
            "store",
            "cannot be read here: is not a store of composer-plugins name another file",
        ),
        (
            "store = '{store}'\nfilter.kwargs.kinds = 'replay'",
            "error",
            "kinds",
            "it is 'replay' reference, replay",
        ),
        (
            "store = '{store}'\nfilter.kwargs.kinds = ['replay']",
            "error",
            "kinds",
            "hint_weight = 0.1 is set, and the kinds ['replay'] stamp no reference add 'reference'",
        ),
        ("store = '{store}'\nfilter.kwargs.kinds = ['hint']", "error", "kinds", "it is ['hint']"),
        ("store = '{store}'\nfilter.kwargs.kinds = []", "error", "kinds", "it is []"),
    ],
)
def test_an_option_of_the_echo_filter_is_checked_before_the_first_rollout(
    find: Find, tmp_path: Path, kwargs: str, severity: str, key: str, words: str
) -> None:
    (tmp_path / "not.store").write_text("nothing of the kind")
    StoreWriter(tmp_path / "pairs.store").close()
    given = kwargs.format(file=tmp_path / "not.store", store=tmp_path / "pairs.store")
    echo = ECHO.replace('store = "pairs.store"', given)
    text, at = edited(('"grpo"', echo)), f"orchestrator.algo.filter.kwargs.{key}"
    for file in (text, text.replace(SOURCE, "")):  # which may stand in another file
        found = {one.key: one for one in find(file, "0.8.0")}
        assert found[at].severity == severity
        assert all(word in f"{found[at].problem} {found[at].remedy}" for word in words.split())


def test_a_filter_that_cannot_be_imported_is_found(find: Find, modules: Path) -> None:
    for path, words in (
        ("stored_stamps.echo_filtr", "did you mean 'echo_filter'"),
        ("nowhere.fn", "no module"),
    ):
        text = edited(('"grpo"', ECHO.replace("stored_stamps.echo_filter", path)), (SOURCE, ""))
        found = [one for one in find(text, python=sys.executable) if one.key.endswith("filter.import_path")]
        assert [(one.severity, one.key) for one in found] == [
            ("error", "orchestrator.algo.filter.import_path")
        ]
        assert words in f"{found[0].problem} {found[0].remedy}"


def test_an_echo_without_a_filter_stamps_nothing(find: Find) -> None:
    found = find(edited(('"grpo"', '"echo"'), more=f"{FILTERS}enforce = false"), "0.8.0")
    assert [(one.key, one.severity) for one in found] == [("orchestrator.algo.type", "error")]


def test_the_kwargs_of_a_named_function_are_its_own_policys(find: Find) -> None:
    named = ("prime_rl_plugin.loss_fn", "prime_rl_plugin.cispo")
    assert find(edited(named, (POLICY, "policy_params.clip_high = 4.0"))) == []
    (found,) = find(edited(named, (POLICY, "policy_params.tv_low = 0.1")))
    assert "cispo" in found.problem and "tv_low" in found.problem


def test_every_mistake_in_the_kwargs_is_found_at_once(find: Find) -> None:
    found = find(edited((POLICY, 'policy = "cipso"\nkl_tau = 0.1\nhint_top_k = 4\nhint_estimator = "k9"')))
    names = ("hint_top_k", "kl_tau", "hint_estimator", "policy")
    errors = [one.key for one in found if one.severity == "error"]
    assert errors == [f"trainer.loss.kwargs.{name}" for name in names]


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
def test_an_environment_whose_code_names_no_stamp_is_reported(
    find: Find, words: list[str], expected: list[str]
) -> None:
    found = find(SOUND, plugins={"my-env": words})
    assert [one.severity for one in found] == ["warning"] * len(expected)
    for one, phrase in zip(found, expected, strict=True):
        assert one.key == "orchestrator.train.source.env.taskset.id" and one.problem.startswith(phrase)
        assert "'grpo' stamps nothing" in one.problem and "finalize" in one.remedy


def test_an_environment_that_is_not_installed_is_warned_of(find: Find) -> None:
    found = find(edited((REPLAY, "")), plugins={"my-env": None})
    assert [one.severity for one in found] == ["warning"]
    assert "my-env is not installed" in found[0].problem and "--python" in found[0].remedy


def test_an_environment_that_stamps_upstreams_ref_kl_as_well_is_warned_of(
    find: Find,
) -> None:
    both = [*STAMPS, "ref_kl"]
    found = find(SOUND, plugins={"my-env": both})
    assert [one.severity for one in found] == ["warning"]
    assert "PRIME-RL's own ref_kl: a sample gets both" in found[0].problem and "not both" in found[0].remedy
    assert find(edited((HINT, "")), plugins={"my-env": both}) == []


def test_a_trainers_own_config_has_its_loss_at_the_top(find: Find) -> None:
    text = f'[loss]\ntype = "custom"\n{FUNCTION}\n[loss.kwargs]\n'
    assert find(text) == find(text, "0.6.0") == []
    assert [(one.key, one.severity) for one in find(text + "polcy = 'cispo'")] == [
        ("loss.kwargs.polcy", "error")
    ]
    assert [(one.key, one.severity) for one in find(text + HINT)] == [("loss.kwargs", "info")]
    assert not [one for one in find(text, "0.4.0") if one.severity == "error"]  # its trainer starts it


def test_stamps_that_may_be_of_hints_are_not_taken_for_pairs(find: Find) -> None:
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
    "orchestrator.teacher_model deployment deployment.num_teacher_gpus loss teacher_gpu_ids "
    "orchestrator.group_size orchestrator.rollouts_per_example orchestrator.advantage "
    "orchestrator.advantage.type orchestrator.algo.filter.kwargs.store optim slurm"
)


def test_a_value_of_any_type_is_a_finding_or_one_error(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_training_mode_of_another_shape_is_found(find: Find) -> None:
    text = edited(("group_size = 8", "group_size = 8\ntraining_mode = ['opd']"))
    found = [one for one in find(text, "0.6.0") if one.key == "orchestrator.training_mode"]
    assert [one.severity for one in found] == ["error"]
    assert "['opd']" in found[0].problem and found[0].remedy


def test_a_loss_of_somebody_elses_is_looked_up_and_its_kwargs_left_alone(
    find: Find,
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
    assert "replay_weight" in found[0].problem and "hint_weight" not in found[0].problem
    assert prime_rl_doctor.examine([over, base], target).findings == ()


@pytest.mark.parametrize(
    ("release", "since"),
    [
        ("0.4.0", "0.4"),
        ("v0.5.0", "0.5"),
        ("0.5.1.dev12", "0.5"),
        ("0.6.0", "0.6"),
        ("0.7", "0.7"),
        ("0.8.0", "0.7"),
        ("0.8.1.dev51", "0.7"),
        ("0.8.1.dev52+gabc", "0.8.1.dev52"),
        ("0.8.1.dev67", "0.8.1.dev52"),
        ("559b447", "0.8.1.dev52"),
        (None, "0.8.1.dev52"),
        ("0.8.1.dev68", "after #3586"),
        ("0.8.1", "after #3586"),
        ("0.9", "after #3586"),
        ("HEAD", "after #3586"),
        ("3418", "#3418"),
        ("#3526", "#3526"),
        ("3586", "#3586"),
    ],
)
def test_each_release_has_the_contract_of_its_generation(release: str | None, since: str) -> None:
    assert upstream.generation_of(release).since == since


def test_the_version_that_is_given_wins_over_the_installed_one(find: Find) -> None:
    text = edited((REPLAY, ""))
    found = find(text, None, prime_rl=["0.6.0", ABSENT])
    assert [one.severity for one in found] == ["warning", "error"]
    hints = {"my-env": ["stamp_reference"]}
    assert find(text, "559b447", prime_rl=["0.6.0", ABSENT], plugins=hints) == []


@pytest.mark.parametrize("version", ["0.9.0", "0.8.1", "HEAD"])
def test_a_version_that_is_newer_than_tested_is_warned_of_and_a_hint_works_there(
    find: Find, version: str
) -> None:
    found = find(edited((REPLAY, "")), version, plugins={"my-env": ["stamp_reference"]})
    assert [(one.key, one.severity) for one in found] == [("prime-rl", "warning")]
    assert "newer than the newest that was tested, 0.8.1.dev67 (commit 559b447)" in found[0].problem
    (found, *_) = [one for one in find(SOUND, version) if one.severity == "error"]
    assert found.key == "trainer.loss.kwargs.replay_weight"
    assert "divides by the sum of the weights" in found.problem and "0.8.1.dev67" in found.remedy


def test_a_hint_is_filtered_out_after_559b447_too(find: Find) -> None:
    found = find(edited((REPLAY, ""), (OFF, "")), "0.9.0")
    assert "orchestrator.train.filter_zero_advantages" in {one.key for one in found}


def test_metadata_alone_are_warned_of(find: Find) -> None:
    found = find(edited((HINT, ""), (REPLAY, "")), prime_rl=["0.4.0", ABSENT], plugins={"my-env": []})
    (warned,) = [one for one in found if one.key == "prime-rl"]
    assert warned.severity == "warning" and "its metadata say 0.4.0" in warned.problem
    assert "--version" in warned.remedy


# By tag: what its metadata say, and files of its package with what they have in them.
TREES = {
    "0.4": ("0.1.0", {"trainer/rl/loss.py": "def setup_loss_fn(\ndef default_loss_fn("}),
    "0.5": (
        "0.4.0",
        {
            "trainer/rl/loss.py": "def setup_loss_fn(\ndef default_loss_fn(",
            "configs/trainer.py": "class SFTLossConfig",
        },
    ),
    "0.6": ("0.6.0", {"trainer/rl/loss.py": "def setup_loss_fns(\ndef default_loss_fn("}),
    "0.7": ("0.8.0", {"trainer/rl/loss.py": "def setup_rl_loss_fn(\ndef default_loss_fn("}),
    "0.8.1.dev52": (
        "0.8.0",
        {
            "trainer/rl/loss.py": "def setup_rl_loss_fn(\ndef default_loss_fn(",
            "orchestrator/trajectories.py": "node.loss_weights",
        },
    ),
    "#3418": (
        "0.8.0",
        {
            "trainer/rl/loss.py": "def setup_rl_loss_fn(\ndef ipo_loss_fn",
            "configs/trainer.py": "    eps: float = Field(0.1, ge=0)",
            "orchestrator/trajectories.py": "node.loss_weights",
        },
    ),
    "#3526": (
        "0.8.0",
        {
            "trainer/rl/loss.py": "def setup_rl_loss_fn(\nclass IPOLoss\nclass IcePopLoss",
            "configs/trainer.py": "    eps: float = Field(0.1, ge=0)",
        },
    ),
    "#3586": (
        "0.8.0",
        {
            "trainer/rl/loss.py": "def setup_rl_loss_fn(\nclass IPOLoss\nclass IcePopLoss",
            "configs/trainer.py": "    eps: float = Field(0.3, ge=0)",
        },
    ),
    "after #3586": (
        "0.8.0",
        {
            "trainer/rl/loss.py": "def setup_rl_loss_fn(\nclass IPOLoss\nclass IcePopLoss",
            "configs/trainer.py": "    eps: float = Field(0.3, ge=0)\nclass CISPOLossConfig",
        },
    ),
}


@pytest.mark.parametrize("since", TREES)
def test_the_generation_is_told_by_the_source_and_not_by_the_metadata(
    since: str, modules: Path, tmp_path: Path
) -> None:
    number, files = TREES[since]
    info = modules / f"prime_rl-{number}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: prime-rl\nVersion: {number}\n")
    for name, text in files.items():
        (modules / "prime_rl" / name).parent.mkdir(parents=True, exist_ok=True)
        (modules / "prime_rl" / name).write_text(text)
    file = tmp_path / "rl.toml"
    file.write_text('[trainer.loss]\ntype = "custom"\nimport_path = "pkg.mod.loss_fn"')
    examined = prime_rl_doctor.examine([file], Target(sys.executable, None))
    assert examined.against.startswith(f"the contract of PRIME-RL {since} ")
    assert "its source has these features" in examined.against
    assert [one.key for one in examined.findings if one.key == "prime-rl"] == ["prime-rl"] * ("#" in since)


@pytest.mark.parametrize(
    ("text", "version", "words"),
    [
        ("[trainer.loss\n", None, "rl.toml: is not TOML:"),
        ("[project]\nname = 'x'", None, "is not a config of PRIME-RL [trainer], [loss]"),
        ("trainer = 3", None, "trainer: it is 3; make it a table: [trainer]"),
        ("[trainer.loss]\n[[orchestrator]]", None, "orchestrator: it is [{}]; make it a table"),
        ("[trainer]\nloss = 3", None, "trainer.loss: it is 3; make it a table"),
        (SOUND, "0.3.0", "takes no custom loss; upgrade PRIME-RL to 0.5 or later"),
        (SOUND, "", "--version: '' is not a version; write 0.8.0"),
        (SOUND, "newest", "--version: 'newest' is not a version; write 0.8.0"),
    ],
)
def test_what_cannot_be_examined_is_one_error(find: Find, text: str, version: str | None, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        find(text, version)
    assert all(word in str(error.value) for word in words.split())
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.toml: cannot be read: No such file"):
        prime_rl_doctor.read([tmp_path / "nowhere.toml"])


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
        ("pkg.mod.number", "is a int, not a function"),
        ("pkg.mod.Loss.step", "pkg.mod.Loss is not a module step = Loss().step"),
        ("pkg.broken.fn", "importing pkg.broken fails No module named 'not_there_at_all'"),
        ("composer_plugins.adapters.prime_rl_plugin", "has no 'prime_rl_plugin' name one of loss_fn,"),
        ("composer_plugins.loss_fn", "has no 'loss_fn' name one of loss_fn, prime_rl_plugin"),
        ("composer_plugins.adapters.prime_rl_plugin.cipso", "did you mean 'cispo'"),
    ],
)
def test_an_import_path_is_looked_up_as_prime_rl_does(
    find: Find, modules: Path, path: str, words: str
) -> None:
    text = f'[trainer.loss]\ntype = "custom"\nimport_path = "{path}"'
    found = find(text, python=sys.executable)
    assert [(one.key, one.severity) for one in found] == [("trainer.loss.import_path", "error")]
    said = f"{found[0].problem} {found[0].remedy}"
    assert all(word in said for word in words.split()), said


def test_nothing_is_found_in_import_paths_that_resolve(find: Find, modules: Path) -> None:
    for path in ("pkg.mod.loss_fn", "composer_plugins.adapters.prime_rl_plugin.cispo"):
        assert find(f'[trainer.loss]\ntype = "custom"\nimport_path = "{path}"', python=sys.executable) == []


def test_an_environments_source_is_read_without_importing_it(find: Find, modules: Path) -> None:
    (modules / "my_env.py").write_text(
        "raise SystemExit\ndef finalize(): stamp_reference()\nx = {'ref_kl': 1}"
    )
    found = find(edited((FUNCTION, 'import_path = "pkg.mod.loss_fn"')), python=sys.executable)
    assert found == []  # of a loss that is not ours, nothing is known
    found = find(SOUND, python=sys.executable)
    assert [one.problem.partition(" is set")[0] for one in found] == [REPLAY, "hint_weight = 0.1"]
    assert "ref_kl" in found[1].problem


def test_names_that_nothing_can_be_looked_up_by_are_no_traceback(find: Find, modules: Path) -> None:
    (modules / "raises").mkdir()
    (modules / "raises" / "__init__.py").write_text("raise SystemExit('imported')")
    found = find(edited(("my-env", "raises.env"), (REPLAY, "")), python=sys.executable)
    assert [one.severity for one in found] == ["warning"]
    assert "raises.env is not installed" in found[0].problem
    text = edited(("composer_plugins.adapters.prime_rl_plugin.loss_fn", "\\u0000.loss_fn"))
    assert [one.key for one in find(text, python=sys.executable)] == ["trainer.loss.import_path"]


def test_an_interpreter_without_this_package_is_found(find: Find, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\ncd / && exec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    found = find(edited((HINT, ""), (REPLAY, "")), python=str(bare))
    assert [(one.key, one.severity) for one in found] == [("trainer.loss.import_path", "error")]
    assert f"{bare}, which will train, cannot import composer_plugins" in found[0].problem
    assert f"uv pip install --python {bare} composer-plugins" in found[0].remedy


def test_a_package_that_only_the_working_directory_has_is_found(
    find: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `python -c` in the root of a clone imports it: training starts somewhere else."""
    clone = tmp_path / "clone"
    (clone / "composer_plugins").mkdir(parents=True)
    (clone / "composer_plugins" / "__init__.py").write_text("")
    (clone / "composer_plugins" / "errors.py").write_text("")
    (clone / "composer_plugins" / "mine.py").write_text("def loss_fn(inputs): ...")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    bare.chmod(0o755)
    monkeypatch.chdir(clone)
    text = '[trainer.loss]\ntype = "custom"\nimport_path = "composer_plugins.mine.loss_fn"'
    (found,) = find(text, python=str(bare))
    assert (found.severity, found.key) == ("warning", "trainer.loss.import_path")
    assert f"in the working directory {clone} only" in found.problem
    assert f"uv pip install --python {bare} -e ." in found.remedy


def test_what_is_no_interpreter_is_one_error(find: Find) -> None:
    with pytest.raises(ConfigError, match=r"--python: /nowhere/python cannot be run: No such file"):
        find(SOUND, python="/nowhere/python")
    with pytest.raises(ConfigError, match=r"--python: /bin/true is not a Python that answers \(status 0"):
        find(SOUND, python="/bin/true")


def test_the_installed_version_is_read_and_the_newest_distinguished_from_0_8_0(
    find: Find, modules: Path
) -> None:
    info = modules / "prime_rl-0.8.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prime-rl\nVersion: 0.8.0\n")
    (modules / "prime_rl" / "orchestrator").mkdir(parents=True)
    (modules / "prime_rl" / "trainer" / "rl").mkdir(parents=True)
    (modules / "prime_rl" / "__init__.py").write_text("raise SystemExit('imported')")
    (modules / "prime_rl" / "trainer" / "rl" / "loss.py").write_text(
        "def default_loss_fn(): ...\ndef setup_rl_loss_fn(): ..."
    )
    source = modules / "prime_rl" / "orchestrator" / "trajectories.py"
    source.write_text("sample.rl_weights = None")
    text = edited((HINT, ""))
    (modules / "my_env.py").write_text("stamp_replay_pair()")
    keys = {one.key for one in find(text, python=sys.executable)}
    assert keys == {"orchestrator.post_batch_filters", "orchestrator.algo.type"}
    source.write_text("sample.rl_weights = node.loss_weights")
    assert find(text, python=sys.executable) == []


# --- the command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_nothing_is_found_in_a_recipe(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(recipe.parent), str(ROOT)]))
    run = CliRunner().invoke(app, ["doctor", str(recipe)], catch_exceptions=False)
    assert run.exit_code == 0
    assert run.output.count("\n") == 1 and ": nothing found, against the contract of PRIME-RL" in run.output


def test_the_exit_status_is_1_for_an_error_and_0_for_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rl.toml"
    monkeypatch.setattr(prime_rl_doctor, "ask", lambda *_: facts(plugins={"my-env": ["stamp_reference"]}))
    file.write_text(edited((REPLAY, "replay_weight = 2.5")))
    run = CliRunner().invoke(app, ["doctor", str(file)], catch_exceptions=False)
    assert run.exit_code == 0
    assert "warning: orchestrator.train.source.env.taskset.id\n  replay_weight = 2.5 is set" in run.output
    assert f"\n{file}: 1 warning, against" in run.output
    file.write_text(edited((REPLAY, "replay_weight = 2.5"), (OFF, "")))
    run = CliRunner().invoke(app, ["doctor", str(file)], catch_exceptions=False)
    assert run.exit_code == 1
    assert run.output.startswith("error: orchestrator.train.filter_zero_advantages\n")
    assert "  -> set filter_zero_advantages = false in [orchestrator.train]\n" in run.output
    assert ": 1 error, 1 warning, against" in run.output


@pytest.mark.parametrize(
    ("arguments", "status", "stream", "words"),
    [
        (["nowhere.toml"], 2, "stderr", "error: nowhere.toml: cannot be read"),
        (["broken.toml"], 2, "stderr", "error: broken.toml: is not TOML"),
        (
            ["x.toml", "--framework", "nemo"],
            2,
            "stderr",
            "error: --framework: unknown framework 'nemo'; known: prime-rl",
        ),
        (["colon.toml"], 1, "stdout", "error: trainer.loss.import_path"),
    ],
)
def test_the_installed_command_ends_with_its_status(
    tmp_path: Path, arguments: list[str], status: int, stream: str, words: str
) -> None:
    (tmp_path / "broken.toml").write_text("[trainer")
    (tmp_path / "colon.toml").write_text(edited(("prime_rl_plugin.loss_fn", "prime_rl_plugin:loss_fn")))
    command = [sys.executable, "-m", "composer_plugins", "doctor", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == status
    assert getattr(run, stream).startswith(words) and "Traceback" not in run.stderr


def test_json_has_every_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rl.toml"
    monkeypatch.setattr(prime_rl_doctor, "ask", lambda *_: facts())
    file.write_text(edited((OFF, "")))
    run = CliRunner().invoke(
        app, ["doctor", str(file), "--json", "--version", "559b447"], catch_exceptions=False
    )
    data = json.loads(run.output)
    assert run.exit_code == 1
    assert data["framework"] == "prime-rl" and data["files"] == [str(file)] and "559b447" in data["against"]
    (found,) = data["findings"]
    assert found["key"] == "orchestrator.train.filter_zero_advantages" and found["severity"] == "error"
    assert found["problem"] and found["remedy"]


def test_the_doctor_imports_neither_prime_rl_nor_verifiers(tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text(SOUND)
    program = (
        "import sys; from pathlib import Path\n"
        "from composer_plugins.adapters.prime_rl_plugin import doctor as d\n"
        f"d.ask = lambda *_: {facts()!r}\n"
        f"assert d.examine([Path({str(file)!r})], d.Target('python', None)).findings == ()\n"
        "print(*sys.modules)"
    )
    loaded = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split()
    assert not {"prime_rl", "verifiers"} & set(loaded)


def test_the_probe_needs_nothing_but_the_standard_library() -> None:
    tree = ast.parse((ROOT / "adapters" / "prime_rl_plugin/doctor/probe.py").read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    assert {str(name).partition(".")[0] for name in names} <= sys.stdlib_module_names
