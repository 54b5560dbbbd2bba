"""What a framework is, as data: one table for each. No framework is imported here.

To add one, write a table (`contract.Framework`) and put it into `OURS` in `registry.py`, or register it from
your own package with the hook `register_frameworks`. A whole example is parity_tests/rigs/made_up.
"""
