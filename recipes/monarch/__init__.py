"""Training scripts, written for torchrun, in processes that Monarch starts and watches."""


class RankError(Exception):
    """Some ranks failed. The text has the traceback of each."""
