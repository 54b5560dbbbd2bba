"""The module that SPMDActor runs as __main__ in each process; its arguments are those of `script.run`."""

import sys

from composer_plugins.recipes.monarch import script

if __name__ == "__main__":
    script.run(*sys.argv[1:])
