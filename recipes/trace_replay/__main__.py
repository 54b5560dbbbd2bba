"""The command line: `python -m composer_plugins.recipes.trace_replay --help`."""

from composer_plugins.recipes.shared import run_command
from composer_plugins.recipes.trace_replay.commands import app


def main() -> None:
    """Run the command line; an error of ours is one line on stderr and status 2."""
    run_command(app)


if __name__ == "__main__":
    main()
