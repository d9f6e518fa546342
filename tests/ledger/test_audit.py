"""What an audit says of runs that did what they should, and of those that did not."""

import pytest
from ledgers import SIZE, epoch_of, info_of, write_run

from odb_nodes import Ledger, audit
from odb_nodes.ledger.auditing import MOST_STEPS_BEHIND


def record(folder, *steps, rank=0, world_size=1, is_killed=False):
    with Ledger(folder, rank=rank, world_size=world_size) as ledger:
        for info in steps:
            ledger.record(info)
        if is_killed:
            ledger._file.forget()


@pytest.mark.parametrize("kills", [(), (1,), (5, 9, 12), (8,), (9,), (5, 5, 5)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_run_with_restarts_is_that_without(tmp_path, world_size, kills):
    write_run(tmp_path / "whole", world_size)
    write_run(tmp_path / "resumed", world_size, kills=kills)
    whole, resumed = audit(tmp_path / "whole", SIZE), audit(tmp_path / "resumed", SIZE)
    assert resumed.ok, resumed.problems
    assert whole.ok
    assert [one.digest for one in resumed.epochs] == [one.digest for one in whole.epochs]
    assert not any("other samples" in note for note in resumed.notes)
    for epoch in resumed.epochs:
        assert epoch.is_complete
        assert sum(epoch.fates.values()) == SIZE
        assert epoch.fates.keys() == {"trained", "dropped", "skipped (empty)"}
    assert [len(one) for one in resumed.attempts.values()] == [len(kills) + 1] * world_size


def test_the_report_reads_well(tmp_path):
    write_run(tmp_path, 2, epochs=1, kills=(5,))
    report = str(audit(tmp_path, SIZE)).splitlines()
    assert report[0] == f"{tmp_path}: OK"
    assert report[1] == "ranks 0, 1: 2 attempts, from epoch 0 step 0, epoch 0 step 2"
    assert report[2] == (
        "epoch 0: complete; 8 steps; 82 trained, 4 dropped, 4 skipped (empty); 0 filler steps"
    )
    assert report[3].startswith("  digest ")


def test_a_partial_epoch_is_said_to_be_partial(tmp_path):
    write_run(tmp_path, 2, epochs=1, steps=20)
    for rank, end in ((0, 4), (1, 6)):
        record(tmp_path / "cut", *epoch_of(rank, 2)[:end], rank=rank, world_size=2, is_killed=True)
    found = audit(tmp_path / "cut", SIZE)
    assert found.state == "open"
    assert not found.epochs[0].is_complete
    assert "epoch 0: partial, to step 5;" in str(found)
    assert found.notes[1:] == (
        "epoch 0: not all ranks have recorded as many steps: rank 0 4, rank 1 6.",
    )


def test_a_rank_may_be_killed_before_its_first_step_of_an_epoch(tmp_path):
    record(tmp_path, *epoch_of(0, 2), rank=0, world_size=2, is_killed=True)
    record(tmp_path, *epoch_of(1, 2), *epoch_of(1, 2, 1)[:1], rank=1, world_size=2, is_killed=True)
    found = audit(tmp_path, SIZE)
    assert found.state == "open", found.problems
    assert [one.is_complete for one in found.epochs] == [True, False]
    assert found.notes[1:] == (
        "epoch 1: not all ranks have recorded as many steps: rank 0 0, rank 1 1.",
    )


def test_an_attempt_that_leaves_nothing_of_those_before_is_said(tmp_path):
    record(tmp_path, *epoch_of(0, 1)[:5])
    record(tmp_path, *epoch_of(0, 1))
    (note,) = audit(tmp_path, SIZE).notes
    assert note.startswith("rank 0: attempt 2 begins at epoch 0 step 0, so that nothing counts")


def test_an_attempt_that_had_other_samples_at_the_same_steps_is_said(tmp_path):
    """Another run in the folder, or a resume with another configuration."""
    record(tmp_path, *epoch_of(0, 1)[:6])
    record(tmp_path, *epoch_of(0, 1)[2:4], info_of(4, [1]), *epoch_of(0, 1)[5:7])
    record(tmp_path, *epoch_of(0, 1)[3:])
    found = audit(tmp_path, SIZE)
    assert found.ok
    text = "epoch 0: rank 0: an earlier attempt had other samples at step 4: it is of another run"
    assert [note for note in found.notes if note.startswith(text)]


def test_fillers_are_counted(tmp_path):
    write_run(tmp_path, 2, epochs=1, steps=40)
    found = audit(tmp_path, SIZE)
    assert found.ok
    assert found.epochs[0].filler > 10


def test_a_rank_may_be_killed_before_its_last_step_where_another_has_gone_on(tmp_path):
    record(tmp_path, *epoch_of(0, 2)[:-1], rank=0, world_size=2, is_killed=True)
    steps = [*epoch_of(1, 2), *epoch_of(1, 2, 1)[:2]]
    record(tmp_path, *steps, rank=1, world_size=2, is_killed=True)
    found = audit(tmp_path, SIZE)
    assert found.state == "open", found.problems
    assert [one.is_complete for one in found.epochs] == [False, False]
    record(tmp_path, *epoch_of(1, 2, 1)[2:], *epoch_of(1, 2, 2), rank=1, world_size=2)
    problems = audit(tmp_path, SIZE).problems  # an epoch later, that is no excuse
    assert "epoch 0: rank 0: the epoch has no end" in problems[0]
    assert "epoch 1: rank 0 of 2 has no record" in problems[1]


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("behind", [1, MOST_STEPS_BEHIND, MOST_STEPS_BEHIND + 1, 40])
def test_a_rank_may_have_been_killed_a_few_steps_before_another(tmp_path, behind, is_killed):
    """But not before one that has closed its ledger: ranks take the same steps."""
    steps = [epoch_of(rank, 2, steps=60) for rank in range(2)]
    record(tmp_path, *steps[0][:50], rank=0, world_size=2, is_killed=is_killed)
    record(tmp_path, *steps[1][: 50 - behind], rank=1, world_size=2, is_killed=True)
    found = audit(tmp_path, SIZE)
    assert not found.epochs[0].is_complete
    assert found.open_ranks == ((0, 1) if is_killed else (1,))
    if is_killed and behind <= MOST_STEPS_BEHIND:
        assert found.state == "open", found.problems
    else:
        (problem,) = found.problems
        assert problem.startswith("epoch 0: rank 1: the epoch has no end: it was left, or its last")
        assert f"rank 0 50, rank 1 {50 - behind}" in found.notes[1]


@pytest.mark.parametrize("steps", [MOST_STEPS_BEHIND, MOST_STEPS_BEHIND + 1])
def test_a_rank_may_have_been_killed_before_its_first_record(tmp_path, steps):
    record(tmp_path, *epoch_of(0, 2, steps=60)[:steps], rank=0, world_size=2, is_killed=True)
    Ledger(tmp_path, rank=1, world_size=2).close()
    found = audit(tmp_path, SIZE)
    assert "rank 1: nothing is recorded." in found.notes
    if steps <= MOST_STEPS_BEHIND:
        assert found.state == "open", found.problems
    else:
        assert "epoch 0: rank 1 of 2 has no record" in found.problems[0]


def test_a_rank_has_all_steps_before_a_checkpoint_that_another_has_resumed_from(tmp_path):
    steps = [epoch_of(rank, 2, steps=60) for rank in range(2)]
    record(tmp_path, *steps[0][:20], rank=0, world_size=2, is_killed=True)
    record(tmp_path, *steps[0][20:22], rank=0, world_size=2, is_killed=True)
    record(tmp_path / "hole", *steps[0][:20], rank=0, world_size=2, is_killed=True)
    record(tmp_path / "hole", *steps[0][20:22], rank=0, world_size=2, is_killed=True)
    record(tmp_path, *steps[1][:20], rank=1, world_size=2, is_killed=True)
    record(tmp_path / "hole", *steps[1][:19], rank=1, world_size=2, is_killed=True)
    assert audit(tmp_path, SIZE).state == "open"
    assert "rank 1: the epoch has no end" in audit(tmp_path / "hole", SIZE).problems[0]


def test_a_block_that_raises_leaves_the_attempt_as_a_kill_does(tmp_path):
    for rank in range(2):
        with pytest.raises(KeyboardInterrupt), Ledger(tmp_path, rank=rank, world_size=2) as ledger:
            for info in epoch_of(rank, 2)[: 5 - rank]:
                ledger.record(info)
            raise KeyboardInterrupt
    found = audit(tmp_path, SIZE)
    assert found.state == "open", found.problems


# --- what is wrong --------------------------------------------------------------------------------


def test_a_sample_that_comes_twice_is_named_with_both_places(tmp_path):
    record(tmp_path, info_of(0, [5, 6]), info_of(1, [7]), rank=0, world_size=2)
    other = info_of(1, [2, 6], left_out=[(7, "dropped")])
    record(tmp_path, info_of(0, [1]), other, rank=1, world_size=2)
    assert audit(tmp_path).problems == (
        "epoch 0: key 6 has 2 fates: trained at rank 0 step 0; trained at rank 1 step 1.",
        "epoch 0: key 7 has 2 fates: trained at rank 0 step 1; dropped at rank 1 step 1.",
    )


def test_of_many_that_come_twice_some_are_named(tmp_path):
    record(tmp_path, info_of(0, range(1000)), info_of(1, range(500, 900), ends=True))
    problems = audit(tmp_path).problems
    fates = "trained at rank 0 step 0; trained at rank 0 step 1"
    assert problems[19] == f"epoch 0: key 519 has 2 fates: {fates}."
    assert problems[20] == "epoch 0: 380 more keys have several fates."
    assert len(problems) == 21


def test_a_sample_that_is_missing_is_named(tmp_path):
    record(tmp_path, info_of(0, [0, 1, 4]), info_of(1, [8, 9, 10], ends=True))
    assert audit(tmp_path).ok
    assert audit(tmp_path, 12).problems == (
        "epoch 0: 6 of 12 samples have no fate: keys 2 to 3, 5 to 7, 11.",
    )
    record(tmp_path / "partial", info_of(0, [0, 1, 4]), info_of(1, [8, 9, 10]))
    assert audit(tmp_path / "partial", 12).ok


def test_keys_that_are_no_indices_are_counted(tmp_path):
    record(tmp_path, info_of(0, [0, 1 << 40, (1 << 40) + 77], ends=True))
    assert audit(tmp_path, 3).ok
    assert audit(tmp_path, 5).problems == ("epoch 0: 2 of 5 samples have no fate.",)
    assert audit(tmp_path, 2).problems == ("epoch 0: 3 samples have a fate, but it has 2.",)


def test_a_mixture_has_a_size_for_each_source(tmp_path):
    sources = ["web", "code", "web", "code"]
    record(tmp_path, info_of(0, [0, 0, 1, 2], sources=sources, ends=True))
    assert audit(tmp_path).ok
    assert audit(tmp_path, {"web": 2}).ok
    assert audit(tmp_path, {"web": 2, "code": 3, "math": 4}).problems == (
        "epoch 0: 1 of 3 samples of source 'code' have no fate: key 1.",
        "epoch 0: no sample of source 'math' has a fate, of 4.",
    )
    with pytest.raises(ValueError, match=r"`size` must be a dict.*\['code', 'web'\]"):
        audit(tmp_path, 5)


@pytest.mark.parametrize("size", [-1, 1.5, "3", {"web": -1}, {"web": None}])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    record(tmp_path, info_of(0, [0], sources=["web"]))
    with pytest.raises((TypeError, ValueError), match="`size"):
        audit(tmp_path, size)


def test_samples_without_a_key_are_counted(tmp_path):
    record(tmp_path, info_of(0, [None, 3, None], sources=["x", "y", "x"], ends=True))
    found = audit(tmp_path, {"x": 2, "y": 1})
    assert found.notes == ("epoch 0: 2 samples of source 'x' have no key: they are only counted.",)
    assert (
        found.problems == ("epoch 0: 1 of 1 samples of source 'y' have no fate: key 0.",)
        or found.ok
    )  # key 3 is no index of a source of one
    assert not audit(tmp_path, {"x": 3}).ok
    assert not audit(tmp_path, {"x": 1}).ok


def test_a_sample_may_come_once_in_each_cycle(tmp_path):
    steps = [
        info_of(0, [0, 1, 2], repeats=[0, 0, 0]),
        info_of(1, [0, 1, 2], repeats=[1, 1, 1], left_out=[(3, "empty")]),
        info_of(2, [1], repeats=[2], left_out=[(3, "empty")], ends=True),
    ]
    record(tmp_path, *steps)
    found = audit(tmp_path, 4)
    assert found.ok, found.problems
    assert "4 keys come more than once by intent" in found.notes[0]
    record(tmp_path / "twice", *steps[:2], info_of(2, [1, 2], repeats=[2, 1], ends=True))
    assert audit(tmp_path / "twice").problems == (
        "epoch 0: key 2 has 2 fates: trained at rank 0 step 1; trained at rank 0 step 2.",
    )


def test_where_each_rank_has_data_of_its_own_keys_are_of_ranks(tmp_path):
    for rank in range(2):
        steps = [info_of(0, [0, 1], own=[""]), info_of(1, left_out=[(2, "empty")], ends=True)]
        record(tmp_path / "own", *steps, rank=rank, world_size=2)
        shared = [info_of(0, [0, 1]), info_of(1, [2], ends=True)]
        record(tmp_path / "shared", *shared, rank=rank, world_size=2)
    found = audit(tmp_path / "own", 6)
    assert found.ok, found.problems
    assert audit(tmp_path / "own", 7).problems == ("epoch 0: 1 of 7 samples have no fate.",)
    assert len(audit(tmp_path / "shared").problems) == 3
    own = [info_of(0, [0, 1], own=[""]), info_of(1, [1], own=[""], ends=True)]
    record(tmp_path / "twice", *own, rank=0, world_size=2)
    record(tmp_path / "twice", *shared, rank=1, world_size=2)
    assert len(audit(tmp_path / "twice").problems) == 1


def test_what_a_rank_leaves_out_before_its_first_sample_is_its_own_too(tmp_path):
    for rank in range(2):
        left = info_of(0, is_filler=True, left_out=[(0, "empty")])
        rest = [left] if rank else [left, info_of(1, [1], own=[""], ends=True)]
        record(tmp_path, *rest, rank=rank, world_size=2, is_killed=True)
    assert audit(tmp_path).state == "open"


def test_a_step_that_is_missing_or_double_is_named(tmp_path):
    steps = epoch_of(0, 1)
    record(tmp_path, *steps[:3], steps[2], *steps[4:])
    problems = audit(tmp_path).problems
    assert "rank 0, epoch 0: recorded more than once: step 2." in problems
    assert "rank 0, epoch 0: not recorded: step 3." in problems
    record(tmp_path / "late", *steps[:3])
    record(tmp_path / "late", *steps[6:])  # of a checkpoint whose steps were not recorded
    assert audit(tmp_path / "late").problems == ("rank 0, epoch 0: not recorded: step 3 to 5.",)


def test_a_rank_without_a_file_is_named(tmp_path):
    for rank in (0, 3):
        record(tmp_path, *epoch_of(rank, 4), rank=rank, world_size=4)
    assert "rank 1 to 2 of 4 has no record" in audit(tmp_path).problems[0]


def test_an_epoch_that_was_left_is_a_hole(tmp_path):
    record(tmp_path, *epoch_of(0, 1)[:5], *epoch_of(0, 1, 1))
    (problem,) = audit(tmp_path).problems
    assert "epoch 0: rank 0: the epoch has no end" in problem
    record(tmp_path / "skipped", *epoch_of(0, 1), *epoch_of(0, 1, 2))
    assert audit(tmp_path / "skipped").problems == ("epoch 1 has no record, but epoch 2 has.",)


def test_where_no_step_says_that_it_is_the_last_that_is_said(tmp_path):
    """As in a graph without a `RankAligner`."""
    record(tmp_path, *(info_of(step, [step]) for step in range(4)), info_of(0, [1], epoch=1))
    found = audit(tmp_path)
    assert found.ok
    assert "the graph has no `RankAligner`" in found.notes[0]


def test_a_ledger_that_begins_late_is_partial(tmp_path):
    record(tmp_path, *epoch_of(0, 1)[3:], *epoch_of(0, 1, 1))
    found = audit(tmp_path, SIZE)
    assert found.ok
    assert [one.is_complete for one in found.epochs] == [False, True]
    assert found.notes == ("epoch 0: what was before step 3 is not recorded.",)


def test_in_a_notebook_it_is_a_table_of_the_epochs(tmp_path):
    record(tmp_path / "<run>", info_of(0, [0, 1], ends=True), info_of(0, [0], epoch=1))
    html = audit(tmp_path / "<run>", 2)._repr_html_()
    assert "<td>complete</td><td>2 trained</td>" in html
    assert "<td>partial, to step 0</td><td>1 trained</td>" in html and "<run>" not in html


def test_no_ledger_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file `rank-00000.ledger`"):
        audit(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"new` has no ledger: there is no such folder"):
        audit(tmp_path / "new")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`folder` must be a folder, but `.*file` is a file"):
        audit(tmp_path / "file")
    (tmp_path / "rank-00000 (1).ledger").touch()
    with pytest.raises(ValueError, match=r"`.*rank-00000 \(1\).ledger` must be named as"):
        audit(tmp_path)


def test_a_ledger_without_a_record_is_said_to_be_empty(tmp_path):
    Ledger(tmp_path).close()
    found = audit(tmp_path)
    assert found.state == "open" and not found.epochs
    assert found.notes[0] == "rank 0: nothing is recorded."
    assert "rank 0: 0 attempts\n" in str(found)
    problems = ("no sample has a fate, of 5: nothing is recorded.",)
    assert audit(tmp_path, 5).problems == audit(tmp_path, {"a": 2, "b": 3}).problems == problems
    assert not audit(tmp_path, 0).problems


# --- another number of ranks ----------------------------------------------------------------------


def test_an_epoch_may_have_another_number_of_ranks_than_the_one_before(tmp_path):
    for rank in range(4):
        steps = epoch_of(rank, 4) + epoch_of(rank, 4, 1)[: 2 + rank]
        record(tmp_path, *steps, rank=rank, world_size=4)
    for rank in range(2):
        record(tmp_path, *epoch_of(rank, 2, 1), rank=rank, world_size=2)
    found = audit(tmp_path, SIZE)
    assert found.ok, found.problems
    assert [one.world_sizes for one in found.epochs] == [(4,), (2,)]
    assert all(one.is_complete for one in found.epochs)


def test_the_number_of_ranks_may_change_within_an_epoch(tmp_path):
    def steps(rank, world_size, begin, end):
        shares = {step: range(8 * step + rank, 8 * step + 8, world_size) for step in range(10)}
        return [info_of(step, shares[step], ends=step == 9) for step in range(begin, end)]

    for rank in range(4):
        record(tmp_path, *steps(rank, 4, 0, 7 - rank % 2), rank=rank, world_size=4)
    for rank in range(2):
        record(tmp_path, *steps(rank, 2, 5, 10), rank=rank, world_size=2)
    found = audit(tmp_path, 80)
    assert found.ok, found.problems
    assert found.epochs[0].is_complete
    assert found.epochs[0].world_sizes == (4, 2)


# --- digests --------------------------------------------------------------------------------------


def test_the_first_step_that_differs_is_found_by_halves(tmp_path):
    steps = epoch_of(0, 1, steps=40)
    other = list(steps)
    other[23] = info_of(23, [*steps[23].keys[::-1]])
    record(tmp_path / "a", *steps)
    record(tmp_path / "b", *other)
    (a,), (b,) = (audit(tmp_path / name).epochs for name in "ab")
    assert a.digest != b.digest
    low, high = 0, a.steps  # the first `low` steps are alike, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        alike = a.digest_of_first(middle) == b.digest_of_first(middle)
        low, high = (middle, high) if alike else (low, middle)
    assert low == 23


def test_a_digest_is_of_keys_sources_repeats_fates_ranks_and_steps(tmp_path):
    runs = {
        "plain": [info_of(0, [1, 2], ends=True)],
        "key": [info_of(0, [1, 3], ends=True)],
        "order": [info_of(0, [2, 1], ends=True)],
        "source": [info_of(0, [1, 2], sources=["", "a"], ends=True)],
        "other source": [info_of(0, [1, 2], sources=["", "b"], ends=True)],
        "repeat": [info_of(0, [1, 2], repeats=[0, 1], ends=True)],
        "fate": [info_of(0, [1], left_out=[(2, "dropped")], ends=True)],
        "other fate": [info_of(0, [1], left_out=[(2, "empty")], ends=True)],
        "step": [info_of(0, [1]), info_of(1, [2], ends=True)],
        "filler": [info_of(0, [1, 2]), info_of(1, is_filler=True, ends=True)],
        "empty": [info_of(0, [1, 2]), info_of(1, ends=True)],
    }
    for name, steps in runs.items():
        record(tmp_path / name, *steps)
    digests = {name: audit(tmp_path / name).epochs[0].digest for name in runs}
    assert len({*digests.values()}) == len(runs)


def test_a_digest_stays_as_it_is(tmp_path):
    """Of version 1: people compare them over versions of this library."""
    write_run(tmp_path, 2, epochs=1)
    assert audit(tmp_path).epochs[0].digest == (
        "3c4bb9698a9542a15b93c09802e661102bd2cea05ae5e09a6a1e8db2dd2bcd4d"
    )
