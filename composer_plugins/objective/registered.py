"""Our loss in a framework's registry, as `composer/<name>`, or as `composer`.

verl and SkyRL have such registries. A table of our options in their configs says which loss `composer` is.
"""


def is_ours(name: str) -> bool:
    """Whether a registered name is `composer` or `composer/<name>`."""
    return name == "composer" or name.startswith("composer/")


def loss_in(name: str) -> str | None:
    """The loss in `composer/<name>`; None if the table of our options says which it is."""
    return name.removeprefix("composer/") if name.startswith("composer/") else None
