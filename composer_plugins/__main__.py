"""`python -m composer_plugins`: the command line."""

from composer_plugins.cli import main

main()
