from serving.gateway.responses.store import ResponseStore


def store_at(now, **limits):
    return ResponseStore(clock=lambda: now[0], **limits)


def test_what_is_put_is_found_until_it_expires():
    now = [0.0]
    store = store_at(now, ttl_s=10)
    store.put("a", b"{}", [{"role": "user", "content": "é"}])
    now[0] = 9.9
    assert store.get("a").conversation() == [{"role": "user", "content": "é"}]
    now[0] = 10
    assert store.get("a") is None and len(store) == 0


def test_the_oldest_make_room():
    store = store_at([0.0], max_bytes=25)
    for name in "abc":
        store.put(name, b"x" * 8, [])
    assert [store.get(name) is not None for name in "abc"] == [False, True, True]
    store.put("huge", b"x" * 100, [])
    assert len(store) == 0, "what is larger than the store is not kept"


def test_delete():
    store = store_at([0.0], max_bytes=25)
    store.put("a", b"x" * 8, [])
    assert store.delete("a") and not store.delete("a")
    store.put("b", b"x" * 8, [])
    store.put("c", b"x" * 8, [])
    assert len(store) == 2, "its bytes are free again"
