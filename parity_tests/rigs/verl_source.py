"""The options that verl's own losses and advantages read, found in its source."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

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
HOLDERS = ("config", "algorithm", "actor", "kl_ctrl", "pf_ppo", "policy_loss")  # what an option is read from


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


def options(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a config's values."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from options(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key)
