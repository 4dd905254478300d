"""Where releases of vLLM have the fields of their records.

A record on the wire is an array without names.  Most releases append fields, which costs nothing:
fewer than known mean defaults, more are ignored.  A few moved what was there:

==========================  ==========================================================
request, from 0.21          ``prompt_is_token_ids`` came in at position 10
LoRA adapter, before 0.32   ``tensorizer_config_dict`` sat at position 4
output, from 0.20           one ``prefill_stats`` instead of two counts, at 10
output, from 0.26           ``ec_transfer_params`` came in at position 9
==========================  ==========================================================

Everywhere else in this client a record has the positions of the latest release.  An engine says its
version when it registers; its layout turns a record around on the way out and on the way in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["LATEST", "Layout", "layout_of"]

_LORA_FIELDS = 6
"""Positions of an adapter in the latest layout."""
_PROMPT_IS_TOKEN_IDS = 10
_TENSORIZER = 4
_FIRST = tuple(range(9))
"""Positions of an output that never moved."""
_OUTPUT_FIELDS = 18
"""Positions of an output in the latest layout."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of the releases from one on, until the next one's."""

    since: tuple[int, int]
    """The first release: major and minor number."""
    mixed_prompts: bool = True
    """Whether a request has ``prompt_is_token_ids``."""
    tensorizer: bool = False
    """Whether an adapter has ``tensorizer_config_dict``."""
    outputs: tuple[int | None, ...] | None = None
    """The latest position of each position of an output, None for what there is no more; None
    when all are the latest."""

    @property
    def name(self) -> str:
        """Such as ``0.32``."""
        return ".".join(map(str, self.since))

    def request(self, record: list[Any]) -> list[Any]:
        """A request as these releases take it; what they do not know is left out."""
        if not self.tensorizer and self.mixed_prompts:
            return record
        laid = list(record)
        if isinstance(laid[6], list):
            laid[6] = self.lora(laid[6])
        if not self.mixed_prompts:
            del laid[_PROMPT_IS_TOKEN_IDS]
        return laid

    def lora(self, record: Sequence[Any]) -> list[Any]:
        """An adapter as these releases take it."""
        laid = list(record)
        if self.tensorizer:
            laid.insert(_TENSORIZER, None)
        return laid

    def arguments(self, method: str, args: list[Any]) -> list[Any]:
        """The arguments of a utility call; an adapter of another length is the caller's own."""
        if self.tensorizer and method == "add_lora" and args:
            lora = args[0]
            if isinstance(lora, list) and len(lora) == _LORA_FIELDS:
                return [self.lora(lora), *args[1:]]
        return args

    def output(self, record: Any) -> Any:
        """An output of these releases with the positions of the latest.

        What is no output stays as it is: whoever reads it says so.
        """
        places = self.outputs
        if places is None or type(record) is not list:
            return record
        laid = record[: len(_FIRST)]
        moved = list(zip(record, places, strict=False))[len(_FIRST) :]
        if moved:
            laid += [None] * (_OUTPUT_FIELDS - len(laid))
            for value, place in moved:
                if place is not None:
                    laid[place] = value
        return laid


_LAYOUTS = (
    Layout(
        (0, 18),
        mixed_prompts=False,
        tensorizer=True,
        outputs=(*_FIRST, 10, None, None, 12, 13),
    ),
    Layout((0, 20), mixed_prompts=False, tensorizer=True, outputs=(*_FIRST, 10, 11, 12, 13)),
    Layout((0, 21), tensorizer=True, outputs=(*_FIRST, 10, 11, 12, 13)),
    Layout((0, 26), tensorizer=True),
    Layout((0, 32)),
)
LATEST = _LAYOUTS[-1]
_VERSION = re.compile(r"v?(\d{1,9})\.(\d{1,9})(?!\d)")


def layout_of(version: str) -> tuple[Layout, bool]:
    """The layout of a release, and whether it is known; if not, it is the nearest.

    Args:
        version: as the engine says it; empty when it says none, and then it is no vLLM: such an
            engine has the latest layout.
    """
    if not version:
        return LATEST, True
    match = _VERSION.match(version)
    if match is None:
        return LATEST, False
    release = int(match[1]), int(match[2])
    if release < _LAYOUTS[0].since:
        return _LAYOUTS[0], False
    layout = next(one for one in reversed(_LAYOUTS) if one.since <= release)
    return layout, release <= LATEST.since
