"""Benchmarks: what the client costs beside doing the same by hand.

``python -m tests.benchmarks`` prints one table with budgets and verdicts.  Where two ways of doing
something are compared, they take turns in blocks within one run, so that a busy machine slows both.
"""
