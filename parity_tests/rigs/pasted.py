"""What a user does with the error for a framework's own options that are moved beside a loss of ours."""

from collections.abc import Callable

import pytest

from composer_plugins.errors import ConfigError


def to_paste(run: Callable[[], object]) -> tuple[list[str], str]:
    """The options that the one error of `run` says to remove, and the line to paste; "" where it has none."""
    with pytest.raises(ConfigError) as refused:
        run()
    error = refused.value
    assert "for its own" in error.problem and not error.others, str(error)
    return error.key.split(", "), error.remedy.partition(", and set ")[2]
