"""Messages of real vLLM engines, clients' and coordinators', each with how it was made.

`tests/interop/run record` made the JSON files; `kinds.py` lists what has to be in them.
tests/wire/test_golden.py reads and writes the messages again, without vLLM.
"""
