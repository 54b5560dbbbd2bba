"""`composer-plugins doctor --verl`: the findings in what the probe answered. verl itself is not needed."""

import ast
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from composer_plugins.adapters.verl_plugin import doctor as verl_doctor
from composer_plugins.doctor import Target
from composer_plugins.errors import ConfigError, Finding
from parity_tests.cases.recorded import findings_in_words, recorded
from parity_tests.cases.verl_config import (
    ACTOR,
    DEFAULTS,
    FACTS,
    GRPO,
    HINT,
    LOSS,
    LOSS_MODE,
    MISTAKES,
    NODE,
    OURS,
    PAPERS,
    SOUND,
    SYNC,
    VERL,
    actor,
    answered,
    both,
    changed,
    judged,
    loss,
    node,
    tree,
)
from parity_tests.rigs.commands import error, invoke, output
from parity_tests.rigs.paths import ROOT


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_config_has_no_finding(name: str) -> None:
    assert judged(tree(SOUND[name])) == []


def test_an_environment_alone_is_judged_without_a_config() -> None:
    assert judged(None) == []


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_without_verl_as_it_was_recorded_with_it(name: str) -> None:
    """But for what verl's own check of the whole config says."""
    found = judged(tree(MISTAKES[name]))
    with_verl = recorded("verl")[name].doctor.split(", ")
    ours = findings_in_words(found).split(", ")
    assert ours == with_verl[: len(ours)] and len(with_verl) <= len(ours) + 1
    assert all(one.problem and one.remedy and " None" not in str(one) for one in found[:1])


NO_VERL = {"verl": VERL | {"absent": True, "version": None, "error": "ModuleNotFoundError"}}
UNREGISTERED = {"estimators": ["gae", "grpo"], "losses": ["vanilla"]}


@pytest.mark.parametrize(
    ("key", "answers", "is_composed"),
    [
        ("verl", NO_VERL, False),
        ("verl", {"verl": VERL | {"error": "ImportError: libcudart"}, **UNREGISTERED}, False),
        ("verl.plugins", {"verl": VERL | {"failure": "NameError: x"}, **UNREGISTERED}, True),
        ("hydra", {"composition": "ScannerError: mapping values are not allowed here"}, False),
        ("composer-plugins", {"package": "ModuleNotFoundError: composer_plugins", **UNREGISTERED}, True),
        ("VERL_USE_EXTERNAL_MODULES", UNREGISTERED, True),
    ],
)
def test_a_wrong_environment_is_one_error(key: str, answers: dict[str, Any], is_composed: bool) -> None:
    config = tree(SYNC | {"actor_rollout_ref.model.external_lib": "lib"}) if is_composed else None
    assert findings_in_words(judged(config, **answers)) == f"error {key}"


def check(found: Finding, key: str, words: str) -> None:
    assert (found.key, found.severity) == (key, "error"), found
    text = f"{found.problem} {found.remedy}"
    assert all(word in text for word in words.split()), text


def test_every_mistake_in_the_options_is_found_at_once() -> None:
    options = {"hint_wieght": 0.1, "advantage": "grop", "replay_weight": "1", "rollout_correction": "tis"}
    params = {"clip_hihg": 0.3, "clip_low": -3}
    inert = loss(kl_cov_ratio=0.1) | actor(tau_pos=2.0)
    found = judged(tree(OURS | PAPERS | both(**options, policy_params=params) | inert))
    expected = [*node(**options), *(f"{NODE}.policy_params.{name}" for name in params)]
    expected.append(f"{ACTOR}.tau_pos, {LOSS}.kl_cov_ratio")
    assert sorted(one.key for one in found) == sorted(expected)


def test_another_packages_composer_is_not_judged_as_ours() -> None:
    (found,) = judged(tree(GRPO | {LOSS_MODE: "composer", "composer.clip_mode": "asymmetric"}))
    check(found, f"{LOSS}.composer", "nothing says which loss 'composer' is")


def test_a_mistake_hides_no_other_and_is_not_blamed_on_its_neighbours() -> None:
    """The parameters of a policy whose name is wrong are not examined, and neither is a misspelt weight."""
    wrong = node(policy=7, policy_params={"clip_low": -3}, hint_top_k=0, policy_wieght=0)
    found = judged(tree(OURS | wrong))
    assert [one.key for one in found] == [f"{NODE}.{x}" for x in ("policy", "hint_top_k", "policy_wieght")]


def test_a_release_that_is_too_old_is_one_error() -> None:
    with pytest.raises(ConfigError, match="^verl: it is verl 0.7.1, .* pip install 'verl>=0.8,<0.10'"):
        judged(None, verl=VERL | {"version": "0.7.1"})
    with pytest.raises(ConfigError, match="--version: it is 0.8, and this doctor looks at the verl that is"):
        verl_doctor.examine([], Target("py", "0.8"))


def test_a_file_without_verls_defaults_is_found() -> None:
    (found,) = judged({"algorithm": {"adv_estimator": "composer"}, "actor_rollout_ref": {"actor": None}})
    check(found, "defaults", "nothing of verl's own [ppo_trainer, _self_]")


SHAPES: tuple[Any, ...] = (3, "", [], ["composer"], {"a": 1}, True, float("nan"), None)


def test_a_value_of_any_shape_is_a_finding_or_nothing() -> None:
    keys = [*DEFAULTS, NODE, f"{LOSS}.composer", "algorithm", "trainer", "trainer.v1", "data", "ray_kwargs"]
    keys += [f"{NODE}.{name}" for name in ("policy", "hint_weight", "hint_params", "hint_teacher")]
    for key, shape in product(keys, SHAPES):
        made = tree(HINT | {f"{LOSS}.composer": {"policy": "grpo"}})
        for found in judged(changed(made, {key: shape})):
            assert found.key and found.problem and found.remedy


# --- the command -----------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the doctor asks of an interpreter in which all is well."""
    seen: list[tuple[Any, ...]] = []

    def ask(python: str, _: Path, request: str, **__: Any) -> dict[str, Any]:
        seen.append((python, json.loads(request)))
        return answered(tree(OURS) if json.loads(request)["compose"] else None)

    monkeypatch.setattr(verl_doctor, "ask", ask)
    return seen


def run(*arguments: str) -> tuple[int, str]:
    done = invoke("doctor", *arguments)
    return done.exit_code, done.output


def test_files_and_overrides_are_told_apart(asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    def request() -> tuple[Any, ...]:
        python, sent_ = asked[-1]
        return python, *(sent_[key] for key in ("compose", "folder", "name", "overrides"))

    file = tmp_path / "lr=1.yaml"
    file.write_text("algorithm: {adv_estimator: composer}")
    assert run("--verl", "--python", "py") == (0, "the environment: nothing found, against verl 0.9.1 (py)\n")
    assert request() == ("py", False, "", "ppo_trainer", [])
    overrides = ["a.b=c.yaml", "+c=hdfs://x//y", "~d", "++e=1"]
    status, shown = run("--verl", *overrides[:2], str(file), *overrides[2:])
    assert status == 0 and shown.startswith(f"{file} + 4 overrides: nothing found, against verl 0.9.1")
    assert shown.endswith(f", composed with --config-dir {tmp_path} --config-name lr=1\n")
    assert request()[1:] == (True, str(tmp_path), "lr=1.yaml", overrides)
    status, shown = run("--framework", "verl", "a=1")
    assert status == 0 and shown.startswith("1 override: nothing found")
    assert request()[1:] == (True, "", "ppo_trainer", ["a=1"])
    status, shown = run("--verl", "--json", "a=1")
    found = json.loads(shown)
    assert status == 0 and found.pop("against").startswith("verl 0.9.1")
    assert found == {"framework": "verl", "files": [], "overrides": ["a=1"], "findings": []}


def test_the_exit_status_is_1_for_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_doctor, "ask", lambda *_, **__: answered(tree(GRPO)))
    assert run("--verl", "a=1")[0] == 0
    monkeypatch.setattr(verl_doctor, "ask", lambda *_, **__: answered(None, **NO_VERL))
    status, shown = run("--verl", "--python", "py")
    assert status == 1 and shown.startswith("error: verl\n  py, which will train, has no verl, so")
    assert "the environment: 1 error, against verl 0.8 to 0.9 (none is installed for py" in shown


def test_without_verl_a_config_is_read_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verl_doctor, "ask", lambda *_, **__: answered(None, **NO_VERL))
    file = tmp_path / "my.yaml"
    mine = OURS | {LOSS_MODE: "composer", f"{NODE}.advantage": "grop"}
    file.write_text(json.dumps(changed({"defaults": ["ppo_trainer", "_self_"]}, mine)))
    found = verl_doctor.examine([file], Target("py", None, ("trainer.mine=1",)))
    assert found.against.endswith("read by itself")
    remedies = {one.key: one.remedy for one in found.findings}
    assert remedies.keys() == {"verl", f"{NODE}.advantage"}
    assert remedies[f"{NODE}.advantage"] == "did you mean 'grpo'?"
    worker = {"worker": {"actor": {"clip_ratio_high": 0.3}}}  # EasyR1's
    file.write_text(json.dumps(worker))
    for facts in (answered(None, **NO_VERL), answered(worker)):
        monkeypatch.setattr(verl_doctor, "ask", lambda *_, facts=facts, **__: facts)
        with pytest.raises(ConfigError, match="the config is one of EasyR1: worker stands at its top"):
            verl_doctor.examine([file], Target("py", None))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to examine give a config file, or --verl"),
        (["--framework", "prime-rl"], "no config file of prime-rl .toml"),
        (["algorithm.adv_estimator=composer"], "not known by the suffix --verl"),
        (["--verl", "--framework", "prime-rl"], "--verl: --framework prime-rl is given too"),
        (["--verl", "a.yaml", "b.yaml"], "a.yaml, b.yaml several files main_ppo takes one"),
    ],
)
def test_what_cannot_be_examined_is_one_error(arguments: list[str], words: str) -> None:
    said = error("doctor", *arguments)
    assert all(word in said for word in words.split()) and "\n" not in said


def test_the_help_says_what_verl_is_given() -> None:
    shown = output("doctor", "--help")
    assert "--verl" in shown and "main_ppo --config-dir FOLDER --config-name NAME" in shown


def test_a_release_that_nobody_has_read_is_marked() -> None:
    facts, target = answered(None, verl=VERL | {"version": "0.10.0"}), Target("py", None)
    known = "verl 0.10.0 (py); the doctor knows 0.8 to 0.9"
    assert verl_doctor.compared_with(target, facts, (0, 10)) == known


def test_the_doctor_loads_neither_verl_nor_hydra_and_its_own_process_no_torch() -> None:
    program = (
        "import sys, warnings; warnings.simplefilter('error', UserWarning)\n"
        "from composer_plugins.adapters.verl_plugin import doctor\n"
        "assert 'torch' not in sys.modules\n"
        "from composer_plugins.adapters.verl_plugin.sync_trainer import checks as r\n"
        f"facts = {FACTS!r} | {{'config': {tree(HINT)!r}}}\n"
        "facts['findings'] = r.findings(r.Run(facts['config']), facts)\n"
        "assert not list(doctor.judge(facts, 'python'))\n"
        "print(*sys.modules)"
    )
    loaded = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split()
    assert not {"omegaconf", "hydra", "ray", "verl"} & set(loaded)


def test_the_probe_needs_nothing_but_the_standard_library() -> None:
    source = ast.parse((ROOT / "adapters/verl_plugin/doctor/probe.py").read_text())
    names = {node.module for node in ast.walk(source) if isinstance(node, ast.ImportFrom)}
    names |= {one.name for node in ast.walk(source) if isinstance(node, ast.Import) for one in node.names}
    assert {str(name).partition(".")[0] for name in names} <= sys.stdlib_module_names
