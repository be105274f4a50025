"""The cache: bounded, but never at the cost of one who still wants something."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from grammar_sync.wanted_cache import WantedCache

LIMIT_BYTES = 100
KEYS = st.integers(0, 9)


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache: WantedCache[int, str] = WantedCache(LIMIT_BYTES)
        self.wanted: dict[int, int] = {}
        self.sizes: dict[int, int] = {}

    @rule(key=KEYS)
    def want(self, key: int) -> None:
        was_there = key in self.cache
        assert self.cache.want(key) is not was_there
        self.wanted[key] = self.wanted.get(key, 0) + 1

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def unwant(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.wanted)))
        self.wanted[key] -= 1
        assert self.cache.unwant(key) is (self.wanted[key] == 0)
        if not self.wanted[key]:
            del self.wanted[key]

    @rule(key=KEYS, size_bytes=st.integers(1, 60))
    def put(self, key: int, size_bytes: int) -> None:
        self.cache.put(key, f"value of {key}", size_bytes)
        self.sizes[key] = size_bytes

    @rule(key=KEYS)
    def forget(self, key: int) -> None:
        self.cache.forget(key)
        self.wanted.pop(key, None)
        self.sizes.pop(key, None)

    @invariant()
    def holds(self) -> None:
        kept = {key for key in self.sizes if key in self.cache and self.cache[key] is not None}
        assert self.cache.size_bytes == sum(self.sizes[key] for key in kept)
        assert all(key in self.cache and self.cache.is_wanted(key) for key in self.wanted)
        assert not kept - self.wanted.keys() or self.cache.size_bytes <= LIMIT_BYTES
        for key in set(self.sizes) - kept:
            del self.sizes[key]
            assert key not in self.wanted or self.cache[key] is None


TestHistories = Histories.TestCase
TestHistories.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def test_the_least_recently_wanted_go_first() -> None:
    cache: WantedCache[str, int] = WantedCache(30)
    for number, key in enumerate("abc"):
        cache.want(key)
        cache.put(key, number, 10)
        cache.unwant(key)
    cache.want("a")
    cache.unwant("a")
    cache.want("d")
    cache.put("d", 3, 10)
    assert [key for key in "abcd" if key in cache] == ["a", "c", "d"]
