"""What damage can do to a state."""

from odb_nodes.core.contract.state import add_digest

MISSING = object()


def paths(state, path=()):
    """Yield the path of every part of a state; of long lists those of the first two."""
    items = state.items() if isinstance(state, dict) else enumerate(state[:2])
    for key, value in items:
        yield (*path, key)
        if isinstance(value, (dict, list, tuple)):
            yield from paths(value, (*path, key))


def replaced(state, path, value):
    """Return a copy of a state with another part; without it where `value` is `MISSING`."""
    key, *rest = path
    copy = dict(state) if isinstance(state, dict) else list(state)
    if rest:
        copy[key] = replaced(copy[key], rest, value)
    elif value is MISSING:
        del copy[key]
    else:
        copy[key] = value
    return copy if isinstance(state, dict) else type(state)(copy)


def mutations(value):
    """Yield what may stand in place of a value, by name."""
    yield from {
        "None": None,
        "-1": -1,
        "2**62": 2**62,
        "a string": "x",
        "True": True,
        "1.5": 1.5,
        "[]": [],
        "{}": {},
        "a byte": b"\x01",
        "nothing": MISSING,
    }.items()
    if type(value) is int:
        yield from {"one more": value + 1, "one less": value - 1, "more": 2 * value + 3}.items()
    elif type(value) is bool:
        yield "not", not value
    elif type(value) is str:
        yield "empty", ""
    elif type(value) is dict:
        yield "one field more", {**value, "unknown": 1}
    elif type(value) is list and value:
        yield from {"reversed": value[::-1], "cut": value[:-1], "doubled": value + value}.items()
    elif type(value) is bytes:
        for cut in (1, 4, 12, 32):
            yield f"cut by {cut}", value[:-cut]
        middle = len(value) // 2
        yield "doubled", value + value
        yield "first bit", bytes([value[0] ^ 1]) + value[1:]
        yield "middle bit", value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :]
        yield "last bit", value[:-1] + bytes([value[-1] ^ 0x40])
        yield "all ones", b"\xff" * len(value)
        yield "reversed", value[::-1]


def damaged(state):
    """Yield (what, state) for every mutation of every part of a state."""
    for path in paths(state):
        value = state
        for key in path:
            value = value[key]
        for name, mutation in mutations(value):
            if type(mutation) is not type(value) or mutation != value:
                yield f"{'.'.join(map(str, path))}: {name}", replaced(state, path, mutation)


def resealed(state):
    """Return a changed state as one that was saved like that."""
    return add_digest({key: value for key, value in state.items() if key != "digest"})
