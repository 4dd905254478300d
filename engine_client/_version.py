"""The version, in a module without imports so that building needs no dependency installed."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
