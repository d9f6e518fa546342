"""Samples by their ordinals, from when they are pulled until they are yielded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes import ItemKey, Sample, StateError
from odb_nodes.core.nodes.sample_records import from_records, to_records, with_digests
from odb_nodes.core.nodes.sample_store import SampleStore, from_bits, to_bits
from odb_nodes.core.processing.columns import DataColumns
from odb_nodes.core.sample_block import SampleBlock

PLAIN = Sample(None, 1, 0)


def block_of(ordinals):
    """Samples whose data say their ordinals."""
    items = [ItemKey("", int(ordinal), 1, 0) for ordinal in ordinals]
    return SampleBlock.of(
        [
            Sample({"at": int(ordinal)}, 1 + int(ordinal) % 7, 1, item=item)
            for ordinal, item in zip(ordinals, items, strict=True)
        ]
    )


def unlike_block(ordinals):
    """Samples of which some have other kinds, targets, patches and keys than most."""
    return SampleBlock.of(
        [
            Sample(
                {"at": ordinal},
                1 + ordinal % 7,
                ordinal % 7 if ordinal % 11 else 0,
                int(ordinal % 13 == 0),
                "b" if ordinal % 17 == 0 else "a",
                key=ordinal if ordinal % 5 else None,
                item=ItemKey("", ordinal, 1, int(ordinal % 19 == 0)),
            )
            for ordinal in ordinals.tolist()
        ]
    )


def store_of(ordinals):
    store = SampleStore()
    store.add(np.array(ordinals), block_of(ordinals))
    return store


def ats(block):
    return [data["at"] for data in block.data()]


def array(*ordinals):
    return np.array(ordinals, np.int64)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(0, 2**16)), max_size=30)
)
def test_a_store_gives_what_was_put_in_until_it_is_taken(rounds):
    store, held, after = SampleStore(), {}, 0
    for count, gap, seed in rounds:
        ordinals = np.arange(after + gap, after + gap + count)
        after = int(ordinals[-1]) + 1
        store.add(ordinals, block_of(ordinals))
        held.update(dict.fromkeys(ordinals.tolist()))
        draws = np.random.default_rng(seed)
        taken = draws.choice([*held], draws.integers(0, len(held) + 1), replace=False)
        assert ats(store.look(taken)) == taken.tolist()
        assert ats(store.take(taken)) == taken.tolist()
        for ordinal in taken.tolist():
            del held[ordinal]
        assert store.ordinals().tolist() == [*held]
        assert (len(store), store.oldest(-5)) == (len(held), min(held, default=-5))
        records = store.state(store.ordinals()).to_state()
        assert from_bits(records)[0].tolist() == [*held]
        assert from_records(records[3]).lengths == store.look(store.ordinals()).lengths
    assert store.next_ordinal == after


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2**16)), max_size=12))
def test_records_of_a_store_equal_records_of_its_samples(rounds):
    store, after = SampleStore(), 0
    for count, seed in rounds:
        ordinals = np.arange(after, after + count)
        after += count
        store.add(ordinals, unlike_block(ordinals))
        held, draws = store.ordinals(), np.random.default_rng(seed)
        store.drop(held[draws.random(len(held)) < 0.8])
        records = store.state(store.ordinals()).to_state()[3]
        assert records == to_records(with_digests(store.look(store.ordinals())))


def test_a_state_stays_what_it_was():
    store = store_of(range(5))
    state = store.state(array(0, 4))
    store.take(array(0, 1, 2))
    store.add(array(*range(5, 300)), block_of(range(5, 300)))
    held, pooled = from_bits(state.to_state())
    assert (held.tolist(), pooled.tolist()) == ([0, 1, 2, 3, 4], [0, 4])


def test_a_filler_is_kept_after_it_was_given_out_until_there_is_another():
    store = store_of(range(6))
    store.keep_filler(2)
    assert ats(store.take(array(1, 2))) == [1, 2]
    assert (store.filler, store.ordinals().tolist()) == (2, [0, 2, 3, 4, 5])
    store.keep_filler(2)
    store.keep_filler(4)  # which no step has had yet
    assert store.ordinals().tolist() == [0, 3, 4, 5]
    store.keep_filler(None)
    assert store.ordinals().tolist() == [0, 3, 4, 5]
    store.keep_filler(3)
    store.drop(array(0, 3))
    assert (store.filler, store.ordinals().tolist()) == (None, [4, 5])


def test_a_sample_that_comes_twice_keeps_its_data_until_both_are_out():
    block = SampleBlock.of([Sample({"at": row}, 1, 1) for row in range(2)]).take([0, 0, 1])
    store = SampleStore()
    store.add(np.arange(3), block)
    taken = [store.take(array(ordinal)).data() for ordinal in range(3)]
    assert taken == [[{"at": 0}], [{"at": 0}], [{"at": 1}]]
    assert not store._holders._by_number and not store._holders.rows


def test_chunks_of_which_few_samples_are_held_are_cut_down_to_these():
    store = SampleStore()
    for first in range(0, 500, 50):
        ordinals = np.arange(first, first + 50)
        rows = DataColumns.of([{"ids": np.array([ordinal])} for ordinal in ordinals])
        store.add(ordinals, SampleBlock.of([PLAIN] * 50).with_data(rows))
        out = ordinals[ordinals % 10 > 0]
        assert [row["ids"].item() for row in store.take(out).data()] == out.tolist()
        held = store.look(store.ordinals())
        assert [row["ids"].item() for row in held.data()] == [*range(0, first + 50, 10)]
        assert store._holders.rows <= 250  # of up to 500


def test_bits_say_which_samples_are_held_and_which_of_them_wait():
    for held, pooled in ([], []), ([7], [7]), ([3, 4, 9, 30], [3, 30]), ([3, 4], []):
        bits = to_bits(array(*held), array(*pooled))
        assert [part.tolist() for part in from_bits((*bits, None, None))] == [held, pooled]


@pytest.mark.parametrize(
    "content", [(-1, b"\x80", b"\x80", None, None), (0, b"\xf0", b"\xff", None, None)]
)
def test_bits_that_no_store_has_written_are_damaged(content):
    with pytest.raises(StateError, match="damaged"):
        from_bits(content)
