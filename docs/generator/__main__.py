"""Write the parts of the pages that this environment can make: `make pages` does so in each environment.

With `--rest`: say which parts no environment of `make pages` makes, and what they need.
"""

import sys

from docs.generator.written import IS_HERE, NOT_BY_MAKE, PARTS

if "--rest" in sys.argv[1:]:
    for one in PARTS:
        if one.needs in NOT_BY_MAKE and not IS_HERE[one.needs]():
            print(f"not written: {one}; it needs {one.needs}")
else:
    here = [one for one in PARTS if IS_HERE[one.needs]()]
    written = [str(one) for one in here if one.write()]
    print(f"written: {'; '.join(written) or 'nothing'}; the other {len(here) - len(written)} are up to date")
    missing = dict.fromkeys(one.needs for one in PARTS if one not in here and one.needs not in NOT_BY_MAKE)
    for need in missing:
        names = [str(one) for one in PARTS if one.needs == need]
        print(f"not looked at, because it needs {need}: {'; '.join(names)}")
