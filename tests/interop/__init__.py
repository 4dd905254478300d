"""Tests against real vLLM engines on the CPU.

`tests/interop/run` makes what they need and runs them.

vLLM lives in an environment of its own, outside the checkout. The test process has none of it: the
client needs only msgspec to speak with such engines.
"""
