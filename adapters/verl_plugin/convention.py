"""How verl calls a policy loss of its registry: `composer-plugins check module:function --as verl`."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from composer_plugins.adapters.verl_plugin.upstream import FIRST, release_of
from composer_plugins.calling_convention import Called, Convention, Counts, Function, checked_pair
from composer_plugins.errors import ConfigError, did_you_mean, in_a_line, near
from composer_plugins.frameworks.verl import MODES, MODES_SINCE, OPTIONS
from composer_plugins.frameworks.verl import VERL as VERL_TABLE

if TYPE_CHECKING:
    from torch import Tensor

# Options without a default that one of verl's own losses needs, by the name of its function.
REQUIRED: dict[str, dict[str, float]] = {"compute_policy_loss_dro": {"dro_beta": 0.1}}


class Table(dict[str, Any]):
    """A table of verl's config where verl is not installed: read by attribute, key or `get`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"verl's config has no {name!r} that this check knows") from None


def imported(module: str) -> Any:
    """Return a module of verl; ConfigError where verl is installed and cannot be imported."""
    try:
        return import_module(module)
    except ImportError as error:
        problem = f"{module} cannot be imported here: {in_a_line(error)}"
        raise ConfigError("--as", problem, "install the packages that this verl needs") from error


def with_own(config: Any, own: Mapping[str, Any]) -> Any:
    """Return the config with options of the author's own, by their keys: "policy_loss.ratio_low"."""
    for key, value in own.items():
        *tables, name = key.split(".")
        place = config
        for one in tables:
            if not hasattr(place, one):
                put(place, one, Table())
            place = getattr(place, one)
        put(place, name, value)
    return config


def put(place: Any, name: str, value: Any) -> None:
    """Set an option of verl's class, which is frozen, or of a `Table`."""
    if isinstance(place, Table):
        place[name] = value
    else:
        object.__setattr__(place, name, value)


def actor_config(info: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Return an actor's config with verl's defaults and `options` over them: verl's class, or a `Table`."""
    if find_spec("verl") is None:
        table = Table(policy_loss=Table(rollout_correction=Table()), global_batch_info=dict(info or {}))
        for option in (one for one in OPTIONS if one.kind == "policy" and not one.effect):
            *tables, name = option.key.split(".")
            place = table
            for one in tables:
                place = place[one]
            place[name] = options.pop(name, option.default)
        table.update(options)
        return table
    module = imported("verl.workers.config")
    ActorConfig, PolicyLossConfig = module.ActorConfig, module.PolicyLossConfig

    fields = ActorConfig.__dataclass_fields__
    own = {name: options.pop(name) for name in list(options) if name in PolicyLossConfig.__dataclass_fields__}
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**own),
        **({"global_batch_info": dict(info or {})} if "global_batch_info" in fields else {}),
        **options,
    )


def watch(config: Any) -> dict[str, None]:
    """Return the sentences about misspelt options, to which each read of one adds its own.

    With a default, as in `getattr(config, "clip_ratio_hgih", 0.2)`, such a read raises no error.
    """
    found: dict[str, None] = {}
    if isinstance(config, Table):  # verl is not installed, and a table does not have all of its options
        return found
    places = {name: f"policy_loss.{name}" for name in config.policy_loss} | {name: name for name in config}

    def watched(table: Any, where: str) -> None:
        def missing(self: Any, name: str) -> Any:
            # A user's own config class may have other options, such as `delta`.
            nearest = [places[one] for one in near(name, places, completes=False)]
            hint = f": {did_you_mean(nearest, 'config.')}" if nearest else ""
            if nearest:
                found[f"it reads {where}.{name}, which verl does not have{hint}"] = None
            raise AttributeError(f"verl's config has no {name!r}{hint}")

        own = type(type(table).__name__, (type(table),), {"__getattr__": missing})
        object.__setattr__(table, "__class__", own)

    watched(config.policy_loss, "config.policy_loss")
    watched(config, "config")
    return found


def policy_losses() -> dict[str, Function]:
    """Return verl's registry of policy losses."""
    registry: dict[str, Function] = imported("verl.trainer.ppo.core_algos").POLICY_LOSS_REGISTRY
    return registry


def is_metric(value: Any) -> bool:
    """Whether verl takes it: a number, or a tensor of one number without a gradient.

    verl's Metric detaches a tensor, but its distillation loss adds the metrics as they are, with their graph.
    """
    if isinstance(value, int | float):
        return True
    return getattr(value, "numel", lambda: 0)() == 1 and not getattr(value, "requires_grad", False)


def call(
    function: Function,
    tensors: "Mapping[str, Tensor]",
    counts: Counts,
    options: Mapping[str, Any],
    *,
    own: Mapping[str, Any] = MappingProxyType({}),
) -> Called:
    """Call it by keyword with the counts of the whole batch, as verl's `ppo_loss` does."""
    weights = tensors.get("log_weights")
    info = {
        "dp_size": counts.ranks,
        "batch_num_tokens": counts.tokens,
        "global_batch_size": counts.rows,
        "loss_scale_factor": counts.width,
    }
    required = REQUIRED.get(getattr(function, "__name__", ""), {})
    config = with_own(actor_config(info, **options, **required), own)
    misspelt = watch(config)
    result = function(
        old_log_prob=tensors["old_logprobs"],
        log_prob=tensors["logprobs"],
        advantages=tensors["advantages"],
        response_mask=tensors["mask"],
        config=config,
        rollout_is_weights=None if weights is None else weights.exp(),
        **options,
    )
    loss, problems = checked_pair(result, is_metric, "one number without a gradient")
    return Called(loss / counts.ranks, problems, tuple(misspelt))  # DDP and FSDP average over the ranks


def of_version(function: Function, version: str | None) -> Convention:
    """Return how this version of verl calls a function of its registry; None is the installed one."""
    if version is None:
        with suppress(PackageNotFoundError):
            version = installed("verl")
    version = version or VERL_TABLE.release
    release = release_of(version) or FIRST
    modes = tuple(mode for mode in MODES if release >= MODES_SINCE.get(mode, FIRST))
    return replace(VERL, release=version, options={"loss_agg_mode": modes})


VERL = Convention(
    framework="verl",
    signature="fn(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, "
    "rollout_is_weights)",
    returns="(loss, metrics): a number with a gradient, divided by the counts in config.global_batch_info, "
    "and a dict of numbers. verl's agg_loss divides so",
    call=call,
    optional=("log_weights",),
    must_use=("log_weights",),
    names={
        "logprobs": "log_prob",
        "old_logprobs": "old_log_prob",
        "mask": "response_mask",
        "log_weights": "rollout_is_weights",
    },
    options={"loss_agg_mode": MODES},
    of_version=of_version,
    has_config=True,
)
