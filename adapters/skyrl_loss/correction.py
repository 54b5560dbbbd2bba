"""SkyRL's off_policy_correction as a correction of the catalogue, and the options for one."""

from collections.abc import Callable
from typing import Any

from composer_plugins.errors import ConfigError, unknown
from composer_plugins.frameworks.skyrl import LOG_CLAMP, Key
from composer_plugins.losses.choosing import Choice, choose
from composer_plugins.objective.objective import as_mis

# By level of the weights: their cap, and the bounds outside of which tokens or sequences are dropped.
LEVELS = {"token": (Key.TOKEN_CAP, Key.TOKEN_MASK), "sequence": (Key.SEQUENCE_CAP, Key.PRODUCT_MASK)}
METRICS = ("product", "geometric")


def correction_of(value: Callable[[str], Any]) -> tuple[Choice | None, list[str]]:
    """The correction of a config, and a remark on each part that is not in the catalogue.

    `value` returns the value of an option."""
    level, metric = value(Key.TIS), value(Key.SEQUENCE_MASK)
    caps = {one: value(cap) for one, (cap, _) in LEVELS.items()}
    if value(Key.USE_TIS):
        level, caps["token"] = "token", value(Key.FORMER_CAP)
        if caps["token"] <= 0:
            problem = f"it is {caps['token']:g}, and SkyRL multiplies the loss by at most that number"
            raise ConfigError(Key.FORMER_CAP, problem, f"set {Key.TIS}=token and {Key.TOKEN_CAP}")
    if level is not None and level not in LEVELS:
        raise unknown(Key.TIS, str(level), LEVELS, noun="level")
    if metric is not None and metric not in METRICS:
        raise unknown(Key.SEQUENCE_MASK, str(metric), METRICS, noun="metric")
    remarks = [f"{key} = {value(key)!r}" for key in Key.OUTLIERS if value(key) is not None]
    if metric == "geometric":
        remarks.append(f"{Key.SEQUENCE_MASK} = {metric!r}, which drops sequences by their mean ratio")
    common = {"level": level, "log_ratio_clamp": LOG_CLAMP}
    found = choose("correction", "tis", {"cap": caps[level], **common}, option=Key.TIS) if level else None
    for one, (_, keys) in LEVELS.items():
        low, high = map(value, keys)
        if low is None or high is None or (one == "sequence" and metric != "product"):
            continue
        if one == level and caps[one] >= high:  # a weight within the bounds is never cut to the cap
            found = choose("correction", "mis", {"low": low, "high": high, **common})
        else:
            key = Key.SEQUENCE_MASK if one == "sequence" else keys[1]
            remarks.append(f"{key} = {value(key)!r}, which drops by the ratio, and weights are set too")
    return found, remarks


def correction_options(correction: Choice | None) -> dict[str, Any]:
    """The options of off_policy_correction for these weights; none where SkyRL has no such weight."""
    if correction is None:
        return {}
    correction = as_mis(correction)
    level, low, high = (correction.value(name) for name in ("level", "low", "high"))
    if level not in LEVELS or correction.value("normalise"):
        return {}
    cap, band = LEVELS[level]
    if correction.loss.name == "tis":
        return {Key.TIS: level, cap: correction.value("cap")} if not correction.value("floor") else {}
    options = {Key.TIS: level, cap: high, band[0]: low or 0.0, band[1]: high}
    return options | ({Key.SEQUENCE_MASK: "product"} if level == "sequence" else {})
