"""Which prompts a reference engine has seen before, in whole blocks of tokens."""

from __future__ import annotations

from collections.abc import Iterator

from engine_client.tools.mock.request import LiveRequest

__all__ = ["PrefixCache"]


class PrefixCache:
    """The prefix cache, without a limit: it forgets only when it is cleared."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.cleared = False
        self.requests = self.queries = self.hits = 0

    def admit(self, request: LiveRequest, block_size: int) -> int:
        """Look a prompt up and remember it; return how many of its tokens were known.

        The last token is always computed, since the first output comes of it.
        """
        keys = list(_block_keys(request, block_size))
        known = 0
        reads = request.sampling is None or not request.sampling.skip_prefix_cache
        if reads:
            for key in keys:
                if key not in self._seen or known + block_size >= len(request.prompt):
                    break
                known += block_size
            self.requests += 1
            self.queries += len(request.prompt)
            self.hits += known
        self._seen.update(keys)
        return known

    def clear(self) -> None:
        """Forget everything."""
        self._seen.clear()
        self.cleared = True

    def take_stats(self) -> dict[str, object]:
        """Return what happened since the last time."""
        stats = {
            "reset": self.cleared,
            "requests": self.requests,
            "queries": self.queries,
            "hits": self.hits,
            "preempted_requests": 0,
            "preempted_queries": 0,
            "preempted_hits": 0,
            "hits_by_source": {},
        }
        self.cleared = False
        self.requests = self.queries = self.hits = 0
        return stats


def _block_keys(request: LiveRequest, block_size: int) -> Iterator[int]:
    key = hash((request.cache_salt, request.adapter.id if request.adapter else 0))
    for start in range(0, len(request.prompt) - block_size + 1, block_size):
        key = hash((key, *request.prompt[start : start + block_size]))
        yield key
