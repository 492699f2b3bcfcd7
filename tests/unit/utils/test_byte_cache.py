"""A cache that is bounded in bytes: what leaves it, and in what time."""

from mmrl.utils.byte_cache import ByteCache


def kept(cache, keys="abcdefg"):
    return [key for key in keys if cache.get(key) is not None]


def test_the_least_recently_used_entries_leave_unless_they_are_pinned():
    cache = ByteCache(10)
    for key in "abc":
        cache.put(key, key, 3)
    cache.get("a")
    cache.put("d", "d", 4)
    assert kept(cache) == ["a", "c", "d"]
    cache.put("e", "e", 6, is_pinned=lambda key: key == "a")
    assert kept(cache) == ["a", "e"]


def test_an_entry_beyond_the_bound_stays_alone_or_leaves_the_others():
    for keep_last in (True, False):
        cache = ByteCache(10, keep_last=keep_last)
        cache.put("a", "a", 5)
        cache.put("b", "b", 3)
        cache.put("b", "larger", 11)
        assert kept(cache) == (["b"] if keep_last else ["a"])
        cache.put("c", "c", 5)
        assert kept(cache) == (["c"] if keep_last else ["a", "c"])


def test_a_full_cache_looks_only_at_what_leaves():
    looked_at = []
    cache = ByteCache(1000)
    for number in range(1000):
        cache.put(str(number), number, 1)
    cache.put("new", 0, 1, is_pinned=lambda key: looked_at.append(key) or False)
    assert looked_at == ["0"]
