"""Messages that crossed the sockets between this client's wire layer and real vLLM engines.

`python -m tests.golden.record` made the JSON files; tests/wire/test_golden.py reads and writes the
messages in them again, without vLLM.
"""
