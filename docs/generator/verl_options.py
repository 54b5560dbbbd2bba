"""The options that verl's own losses and advantages read, found in its source; and docs/verl.md's table.

`python -m docs.generator.verl_options` writes the table into docs/verl.md. It does not need verl.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from composer_plugins.frameworks.contract import Option
from composer_plugins.frameworks.verl import OPTIONS, VERL
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import of_kind
from docs.generator.tables import ROOT

# Where verl's losses and advantages read its config: a file, and its functions; (): all of them.
SOURCES: Mapping[str, tuple[str, ...]] = {
    "trainer/ppo/core_algos.py": (),
    "trainer/ppo/rollout_corr_helper.py": (),
    "trainer/ppo/v1/utils.py": ("compute_advantage_for_multi_trajectories",),
    "trainer/ppo/v1/trainer_base.py": ("_compute_advantage", "_compute_old_log_prob", "_update_actor"),
    "trainer/ppo/ray_trainer.py": ("compute_advantage", "apply_kl_penalty"),
    "workers/utils/losses.py": ("ppo_loss",),
}
# The dataclasses of verl's config: the file, and where each stands in OPTION_TABLES.
CONFIGS = {"workers/config/actor.py": "policy", "trainer/config/algorithm.py": "advantage"}
PLACES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "PolicyLossConfig": (("policy", "policy_loss."),),
    "AlgoConfig": (("advantage", ""),),
    "KLControlConfig": (("advantage", "kl_ctrl."),),
    "RolloutCorrectionConfig": (
        ("advantage", "rollout_correction."),
        ("policy", "policy_loss.rollout_correction."),
    ),
}
CORRECTION = "policy_loss.rollout_correction"
HOLDERS = ("config", "algorithm", "actor", "kl_ctrl", "pf_ppo", "policy_loss")  # what an option is read from
OPEN, CLOSE = "<!-- options of verl: python -m docs.generator.verl_options -->", "<!-- end -->"
PAGE = ROOT / "docs/verl.md"


@cache
def fields(verl: Path) -> dict[tuple[str, str], object]:
    """Return the options of verl's dataclasses, as (kind, key), with defaults; `...` for an expression."""
    found: dict[tuple[str, str], object] = {}
    for file in CONFIGS:
        for one in ast.parse((verl / file).read_text()).body:
            if not isinstance(one, ast.ClassDef):
                continue
            actor = one.name.endswith("ActorConfig")
            for kind, prefix in (("policy", ""),) if actor else PLACES.get(one.name, ()):
                for line in one.body:
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                        constant = isinstance(line.value, ast.Constant)
                        default = line.value.value if constant else ...  # type: ignore[union-attr]
                        found.setdefault((kind, prefix + line.target.id), default)
    if ("policy", CORRECTION) not in found:  # verl 0.6
        return {one: default for one, default in found.items() if not one[1].startswith(CORRECTION)}
    return found


def read(verl: Path) -> set[tuple[str, str]]:
    """Return the options, as (kind, key), whose name verl's losses and advantages read from a config."""
    names = {name for file, functions in SOURCES.items() for name in _names(verl / file, functions)}
    return {(kind, key) for kind, key in fields(verl) if key.rpartition(".")[2] in names}


def _names(file: Path, functions: tuple[str, ...]) -> Iterator[str]:
    """Yield the names after `config.`, and in `config.get("...")`, `config["..."]` and getattr."""
    if not file.exists():  # an older verl
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and (not functions or node.name in functions):
            for one in ast.walk(node):
                match one:
                    case ast.Attribute(value=holder, attr=str(name)):
                        pass
                    case ast.Call(
                        func=ast.Attribute(value=holder, attr="get"), args=[ast.Constant(value=str(name)), *_]
                    ):
                        pass
                    case ast.Call(
                        func=ast.Name(id="getattr"), args=[holder, ast.Constant(value=str(name)), *_]
                    ):
                        pass
                    case ast.Subscript(value=holder, slice=ast.Constant(value=str(name))):
                        pass
                    case _:
                        continue
                if any(word in ast.unparse(holder) for word in HOLDERS):
                    yield name


def table() -> str:
    """Return the options that act through a loss of ours as a Markdown table."""
    lines = ["| option of verl: its default | what it sets |", "|---|---|"]
    rows: dict[tuple[str, str], list[str]] = {}  # options of one meaning share a row
    for option in (one for one in OPTIONS if not one.effect):
        key = f"`{VERL.key(option).removeprefix('actor_rollout_ref.')}`"
        rows.setdefault((meaning(option), "" if option.sets else option.kind), []).append(
            f"{key}: {_shown(option.default)}"
        )
    lines += [f"| {', '.join(keys)} | {text} |" for (text, _), keys in rows.items()]
    return "\n".join(lines)


def _shown(value: object) -> str:
    return "null" if value is None else str(value)


def meaning(option: Option) -> str:
    """Return in words what one option does with our losses."""
    if option.without_effect:
        return f"warning: {option.without_effect}; {option.instead}"
    parts, values = [], dict[object, object]()
    running = [one for one in of_kind(losses(), option.kind).values() if VERL.runs(one)]
    for one in option.sets:
        if named := [loss.name for loss in running if one.is_of(loss)]:
            parts.append(f"{', '.join(f'`{name}`' for name in one.parameters)} of {', '.join(named)}")
            values |= one.conversion.values
    if not parts:
        return f"error: {option.instead}"
    text = "; ".join(parts)
    if values:
        text += " (" + ", ".join(f"{_shown(a)} is {b!r}" for a, b in values.items()) + ")"
    if option.fulfilled_by:
        text += f". Already so in {', '.join(option.fulfilled_by)}"
    return f"{text}. Null: the value of `{option.fallback}`" if option.fallback else text


def page() -> str:
    """Return docs/verl.md with the table of today."""
    before, _, rest = PAGE.read_text().partition(OPEN)
    return f"{before}{OPEN}\n{table()}\n{CLOSE}{rest.partition(CLOSE)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
