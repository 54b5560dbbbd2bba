"""What a user of slime writes: our options in `args.composer`, and slime's own arguments."""

from collections.abc import Iterator, Mapping
from typing import Any

from composer_plugins.adapters.slime_loss.upstream import moved
from composer_plugins.errors import Finding, Findings, enforce
from composer_plugins.frameworks.slime import SLIME
from composer_plugins.losses.choosing import Choice
from composer_plugins.objective.by_table import ByTable
from composer_plugins.objective.objective import NORM
from composer_plugins.objective.options import as_yaml
from composer_plugins.objective.own_options import Trained, examined

NODE = "composer"  # the attribute of args with our options
BY_ROLLOUT = ("seq-mean-token-mean", "seq-mean-token-sum", NORM)
NOT_OURS = {"custom_pg_loss_reducer_function_path": "our loss is reduced by slime's own reducer"}
# By input of a policy loss: slime's options (one of them fills the input), and what to set.
FILLED_BY = {
    "teacher_logprobs": (("use_opd",), "set --use-opd with --opd-type, or choose another loss"),
    "ref_logprobs": (("use_kl_loss", "kl_coef"), "set --use-kl-loss with --ref-load, or choose another loss"),
}
SGLANG_TEACHER = ".rollout.on_policy_distillation.reward_func"  # of slime and of Miles
OF_TEACHER = ("opd_kl_coef", "opd_type", "custom_rm_path")
# The attributes of args that decide the loss.
READ = tuple(dict.fromkeys((*ByTable(SLIME).defaults, *SLIME.not_carried, *OF_TEACHER)))


def findings(table: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield an error for a hint that slime's own options do not deliver, or that they count twice."""
    if not options.get("hint_weight"):
        return
    if not table.get("use_opd"):
        problem = f"it is {options['hint_weight']!r}, and without use_opd slime has no teacher"
        yield Finding(
            "error", f"{NODE}.hint_weight", problem, "set --use-opd with --opd-type, and --opd-kl-coef 0"
        )
    elif table.get("opd_kl_coef", 1.0):
        problem = "slime takes the same teacher off the advantages with this weight: it would count twice"
        yield Finding("error", "opd_kl_coef", problem, "set --opd-kl-coef 0, or hint_weight 0")


def of_temperature(table: Mapping[str, Any], options: Mapping[str, Any], policy: Choice) -> Iterator[Finding]:
    """Yield a finding for a teacher behind a server whose logits are not divided as the policy's are.

    slime divides the policy's by rollout_temperature, and a teacher's of opd_type megatron. SGLang divides
    only the logits that it samples from. A reward function of the user's may ask a server that divides more.
    """
    temperature, path = table.get("rollout_temperature", 1.0), table.get("custom_rm_path")
    reads = options.get("hint_weight") or "teacher_logprobs" in policy.loss.needs
    if not reads or table.get("opd_type") != "sglang" or temperature == 1:
        return
    problem = f"it is {temperature!r}, and SGLang gives the teacher's log-probabilities at temperature 1: "
    problem += "they differ from the policy's even where the models are equal"
    remedy = "set --rollout-temperature 1 or --opd-type megatron, or see that a --custom-rm-path of your own "
    remedy += "gives them at this temperature"
    is_users = path and not path.endswith(SGLANG_TEACHER)
    yield Finding("warning" if is_users else "error", "rollout_temperature", problem, remedy)


def not_filled(table: Mapping[str, Any], policy: Choice) -> Iterator[Finding]:
    """Yield an error for an input of the policy loss that slime does not compute with these options."""
    for name, (options, remedy) in FILLED_BY.items():
        if name in policy.loss.needs and not any(table.get(key) for key in options):
            problem = f"{policy.name!r} needs {name}, and slime has none without {' or '.join(options)}"
            yield Finding("error", f"{NODE}.policy", problem, remedy)


def asked_of(table: Mapping[str, Any], options: Any) -> tuple[Trained | None, Findings]:
    """What arguments of slime and our options ask for, and what is wrong, with our keys below "composer"."""
    if not isinstance(options, Mapping):
        problem, remedy = f"it is {options!r}", "write a table of options in --custom-config-path"
        return None, Findings([Finding("error", NODE, problem, remedy)])
    own = {name: options[name] for name in ("mode", "max_length") if name in options}
    given = {name: value for name, value in options.items() if name not in own}
    found, wrong = examined(
        SLIME,
        table,
        given,
        modes=("token-mean",) if table.get("calculate_per_token_loss") else BY_ROLLOUT,
        **own,
        not_ours=NOT_OURS,
        moved=moved(table),
        defaults={"hint_divergence": "sampled_token"},
        at=NODE,
        write=lambda option, value: f"{option}: {as_yaml(value)}",
    )
    every = [*findings(table, given), *wrong]
    if found:
        policy = found.objective.policy
        every += [*not_filled(table, policy), *of_temperature(table, given, policy)]
    return found, Findings(every)


def parsed(args: Any) -> Trained:
    """What `args` asks for, with a warning for each warning; ConfigError for what cannot be delivered."""
    table = {key: getattr(args, key) for key in READ if key not in (NODE, "loss_type") and hasattr(args, key)}
    found, wrong = asked_of(table, getattr(args, NODE, None) or {})
    enforce(wrong)
    assert found is not None
    return found
