"""Audits of correct runs, and of runs with faults."""

import numpy as np
import pytest
from ledgers import SIZE, epoch_of, info_of, record, write_run

from odb_nodes import audit
from odb_nodes.training.ledger.auditing import MOST_STEPS_BEHIND


@pytest.mark.parametrize("kills", [(1,), (5, 9, 12), (8,), (5, 5, 5)])
@pytest.mark.parametrize("world_size", [1, 4])
def test_a_run_with_restarts_is_that_without(tmp_path, world_size, kills):
    write_run(tmp_path / "whole", world_size)
    write_run(tmp_path / "resumed", world_size, kills=kills)
    whole, resumed = audit(tmp_path / "whole", SIZE), audit(tmp_path / "resumed", SIZE)
    assert whole.ok and resumed.ok, resumed.problems
    assert [epoch.digest for epoch in resumed.epochs] == [epoch.digest for epoch in whole.epochs]
    assert not any("other samples" in note for note in resumed.notes)
    for epoch in resumed.epochs:
        assert epoch.is_complete
        assert sum(epoch.fates.values()) == SIZE
        assert epoch.fates.keys() == {"trained", "dropped", "skipped (empty)"}
    assert [len(starts) for starts in resumed.attempts.values()] == [len(kills) + 1] * world_size


def test_the_report_reads_well(tmp_path):
    write_run(tmp_path, 2, epochs=1, kills=(5,))
    report = str(audit(tmp_path, SIZE)).splitlines()
    assert report[0] == f"{tmp_path}: OK"
    assert report[1] == "ranks 0 and 1: 2 attempts, from epoch 0 step 0, epoch 0 step 2"
    assert report[2] == (
        "epoch 0: complete; 8 steps; 82 trained, 4 dropped, 4 skipped (empty); 0 filler steps"
    )
    assert report[3].startswith("  digest ")
    write_run(tmp_path / "fillers", 2, epochs=1, steps=40)
    assert audit(tmp_path / "fillers", SIZE).epochs[0].filler > 10


# --- ranks that were killed apart -----------------------------------------------------------------


def ranks_of(steps):
    return [epoch_of(rank, 2, steps=steps) for rank in range(2)]


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("behind", [1, MOST_STEPS_BEHIND, MOST_STEPS_BEHIND + 1])
def test_a_rank_may_have_been_killed_a_few_steps_before_another(tmp_path, behind, ended):
    """A rank may not end before a rank that has closed its ledger: ranks take the same steps."""
    first, other = ranks_of(60)
    record(tmp_path, *first[:50], rank=0, world_size=2, ended=ended)
    record(tmp_path, *other[: 50 - behind], rank=1, world_size=2, ended=False)
    result = audit(tmp_path, SIZE)
    assert not result.epochs[0].is_complete
    assert result.open_ranks == ((1,) if ended else (0, 1))
    if behind <= MOST_STEPS_BEHIND and not ended:
        assert result.state == "open", result.problems
        text = (
            f"epoch 0: not all ranks have recorded as many steps: rank 0 50, rank 1 {50 - behind}."
        )
        assert result.notes[1:] == (text,)
        assert "epoch 0: partial, to step 49;" in str(result)
    else:
        (problem,) = result.problems
        assert problem.startswith("epoch 0: rank 1: the epoch has no end: it was left, or its last")


@pytest.mark.parametrize("steps", [MOST_STEPS_BEHIND, MOST_STEPS_BEHIND + 1])
def test_a_rank_may_have_been_killed_before_its_first_record(tmp_path, steps):
    record(tmp_path, *ranks_of(60)[0][:steps], rank=0, world_size=2, ended=False)
    record(tmp_path, rank=1, world_size=2)
    result = audit(tmp_path, SIZE)
    assert "rank 1: nothing is recorded." in result.notes
    if steps <= MOST_STEPS_BEHIND:
        assert result.state == "open", result.problems
    else:
        assert "epoch 0: rank 1 of 2 has no record" in result.problems[0]


def test_a_rank_may_be_killed_around_the_end_of_an_epoch_where_another_has_gone_on(tmp_path):
    for name, steps in (("before", epoch_of(0, 2)[:-1]), ("after", epoch_of(0, 2))):
        record(tmp_path / name, *steps, rank=0, world_size=2, ended=False)
        steps = [*epoch_of(1, 2), *epoch_of(1, 2, 1)[:2]]
        record(tmp_path / name, *steps, rank=1, world_size=2, ended=False)
        result = audit(tmp_path / name, SIZE)
        assert result.state == "open", result.problems
        assert [epoch.is_complete for epoch in result.epochs] == [name == "after", False]
    steps = [*epoch_of(1, 2, 1)[2:], *epoch_of(1, 2, 2)]
    record(tmp_path / "before", *steps, rank=1, world_size=2)
    problems = audit(tmp_path / "before", SIZE).problems  # an epoch later, that is no excuse
    assert "epoch 0: rank 0: the epoch has no end" in problems[0]
    assert "epoch 1: rank 0 of 2 has no record" in problems[1]


def test_a_rank_has_all_steps_before_a_checkpoint_that_another_has_resumed_from(tmp_path):
    first, other = ranks_of(60)
    for name, steps in (("whole", 20), ("hole", 19)):
        record(tmp_path / name, *first[:20], rank=0, world_size=2, ended=False)
        record(tmp_path / name, *first[20:22], rank=0, world_size=2, ended=False)
        record(tmp_path / name, *other[:steps], rank=1, world_size=2, ended=False)
    assert audit(tmp_path / "whole", SIZE).state == "open"
    assert "rank 1: the epoch has no end" in audit(tmp_path / "hole", SIZE).problems[0]


# --- what is wrong --------------------------------------------------------------------------------

STEPS = epoch_of(0, 1)
TWICE = "epoch 0: key {} has 2 fates: {} at rank 0 step {}; {} at rank {} step 1."
CYCLES = [
    info_of(0, [0, 1, 2], repeats=[0, 0, 0]),
    info_of(1, [0, 1, 2], repeats=[1, 1, 1], left_out=[(3, "empty")]),
]
OWN = [info_of(0, [0, 1], per_rank=[""]), info_of(1, left_out=[(2, "empty")], ends=True)]
MIXED = [info_of(0, [0, 0, 1, 2], sources=["web", "code", "web", "code"], ends=True)]
NO_KEYS = [info_of(0, [None, 3, None], sources=["x", "y", "x"], ends=True)]
FAR = [info_of(0, [0, 1 << 40, (1 << 40) + 77], ends=True)]
GAPS = [info_of(0, [0, 1, 4]), info_of(1, [8, 9, 10], ends=True)]
PROBLEMS = {
    "twice, on two ranks": (
        [
            [info_of(0, [5, 6]), info_of(1, [7])],
            [info_of(0, [1]), info_of(1, [2, 6], left_out=[(7, "dropped")])],
        ],
        None,
        [
            TWICE.format(6, "trained", 0, "trained", 1),
            TWICE.format(7, "trained", 1, "dropped", 1),
        ],
    ),
    "missing": ([GAPS], 12, ["epoch 0: 6 of 12 samples have no fate: keys 2 to 3, 5 to 7, 11."]),
    "missing, of a partial epoch": ([[GAPS[0]]], 12, []),
    "no indices, too few": ([FAR], 5, ["epoch 0: 2 of 5 samples have no fate."]),
    "no indices, too many": ([FAR], 2, ["epoch 0: 3 samples have a fate, but it has 2."]),
    "missing of sources": (
        [MIXED],
        {"web": 2, "code": 3, "math": 4},
        [
            "epoch 0: 1 of 3 samples of source 'code' have no fate: key 1.",
            "epoch 0: no sample of source 'math' has a fate, of 4.",
        ],
    ),
    "no keys, too few": (
        [NO_KEYS],
        {"x": 3},
        ["epoch 0: 1 of 3 samples of source 'x' have no fate."],
    ),
    "in each cycle": (
        [[*CYCLES, info_of(2, [1], repeats=[2], left_out=[(3, "empty")], ends=True)]],
        4,
        [],
    ),
    "twice in a cycle": (
        [[*CYCLES, info_of(2, [1, 2], repeats=[2, 1], ends=True)]],
        None,
        ["epoch 0: key 2 has 2 fates: trained at rank 0 step 1; trained at rank 0 step 2."],
    ),
    "data of its own": ([OWN, OWN], 6, []),
    "missing of its own": ([OWN, OWN], 7, ["epoch 0: 1 of 7 samples have no fate."]),
    "twice in its own": (
        [[OWN[0], info_of(1, [1], per_rank=[""], ends=True)]],
        None,
        [TWICE.format(1, "trained", 0, "trained", 0)],
    ),
    "an epoch without a record": (
        [[*STEPS, *epoch_of(0, 1, 2)]],
        None,
        ["epoch 1 has no record, but epoch 2 has."],
    ),
    "begins late": ([[*STEPS[3:], *epoch_of(0, 1, 1)]], SIZE, []),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_wrong_is_named_with_its_place_and_nothing_else(tmp_path, name):
    ranks, size, problems = PROBLEMS[name]
    for rank, steps in enumerate(ranks):
        record(tmp_path, *steps, rank=rank, world_size=len(ranks))
    assert [*audit(tmp_path, size).problems] == problems


def test_of_many_that_come_twice_some_are_named(tmp_path):
    record(tmp_path, info_of(0, range(1000)), info_of(1, range(500, 900), ends=True))
    problems = audit(tmp_path).problems
    assert problems[19] == TWICE.format(519, "trained", 0, "trained", 0)
    assert problems[20:] == ("epoch 0: 380 more keys have several fates.",)


def test_what_a_rank_leaves_out_before_its_first_sample_is_its_own_too(tmp_path):
    for rank in range(2):
        first_step = info_of(0, is_filler=True, left_out=[(0, "empty")])
        steps = [first_step] if rank else [first_step, info_of(1, [1], per_rank=[""], ends=True)]
        record(tmp_path, *steps, rank=rank, world_size=2, ended=False)
    assert audit(tmp_path).state == "open"


def test_a_step_that_is_missing_or_double_is_named(tmp_path):
    record(tmp_path, *STEPS[:3], STEPS[2], *STEPS[4:])
    problems = audit(tmp_path).problems
    assert "rank 0, epoch 0: recorded more than once: step 2." in problems
    assert "rank 0, epoch 0: not recorded: step 3." in problems
    record(tmp_path / "late", *STEPS[:3])
    record(tmp_path / "late", *STEPS[6:])  # of a checkpoint whose steps were not recorded
    assert audit(tmp_path / "late").problems == ("rank 0, epoch 0: not recorded: step 3 to 5.",)
    record(tmp_path / "left", *STEPS[:5], *epoch_of(0, 1, 1))
    (problem,) = audit(tmp_path / "left").problems
    assert "epoch 0: rank 0: the epoch has no end" in problem
    for rank in (0, 3):
        record(tmp_path / "ranks", *epoch_of(rank, 4), rank=rank, world_size=4)
    assert "ranks 1 to 2 of 4 have no record" in audit(tmp_path / "ranks").problems[0]


OTHER = [*STEPS[2:4], info_of(4, [1]), *STEPS[5:7]]
NOTES = {
    "begins anew": ([STEPS[:5], STEPS], "rank 0: attempt 2 begins at epoch 0 step 0"),
    "another run": (  # or a resume with another configuration
        [STEPS[:6], OTHER, STEPS[3:]],
        "epoch 0: rank 0: an earlier attempt had other samples at step 4: ",
    ),
    "cycles": ([[*CYCLES, info_of(2, [1], repeats=[2], ends=True)]], "3 keys come more than once"),
    "no keys": ([NO_KEYS], "epoch 0: 2 samples of source 'x' have no key: they are only counted."),
    "late": ([STEPS[3:]], "epoch 0: the steps before step 3 are not recorded."),
    "no `RankAligner`": (
        [[*STEPS[:4], info_of(0, [1], epoch=1)]],
        "graph has no `RankAligner`",
    ),
}


@pytest.mark.parametrize("name", NOTES)
def test_what_is_strange_is_noted(tmp_path, name):
    attempts, text = NOTES[name]
    for steps in attempts:
        record(tmp_path, *steps)
    result = audit(tmp_path)
    assert result.ok and any(text in note for note in result.notes), result


REFUSALS = [
    (".", -1, ValueError, "`size`"),
    (".", 1.5, TypeError, "`size`"),
    (".", {"web": None}, TypeError, "`size"),
    (".", 5, ValueError, r"`size` must be a dict.*\['code', 'web'\]"),
    ("none", None, FileNotFoundError, "no file `rank-00000.ledger`"),
    ("new", None, FileNotFoundError, "new` has no ledger: there is no such"),
    ("file", None, ValueError, "`.*file` is a file"),
    ("copied", None, ValueError, r"rank-00000 \(1\).ledger` must be named"),
]


@pytest.mark.parametrize(("folder", "size", "error", "match"), REFUSALS)
def test_what_is_no_ledger_or_no_size_is_refused(tmp_path, folder, size, error, match):
    record(tmp_path, *MIXED)
    (tmp_path / "none").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied/rank-00000 (1).ledger").touch()
    with pytest.raises(error, match=match):
        audit(tmp_path / folder, size)


def test_a_ledger_without_a_record_is_said_to_be_empty(tmp_path):
    record(tmp_path)
    result = audit(tmp_path)
    assert result.state == "open" and not result.epochs
    assert result.notes[0] == "rank 0: nothing is recorded."
    assert "rank 0: 0 attempts\n" in str(result)
    problems = ("no sample has a fate, of 5: nothing is recorded.",)
    assert audit(tmp_path, 5).problems == audit(tmp_path, {"a": 2, "b": 3}).problems == problems
    assert audit(tmp_path, np.int64(5)).problems == problems
    assert not audit(tmp_path, 0).problems


# --- another number of ranks ----------------------------------------------------------------------


def test_the_number_of_ranks_may_change_between_epochs_and_within(tmp_path):
    def steps(rank, world_size, begin, end):
        shares = {step: range(8 * step + rank, 8 * step + 8, world_size) for step in range(10)}
        return [info_of(step, shares[step], ends=step == 9) for step in range(begin, end)]

    for rank in range(4):
        record(tmp_path / "within", *steps(rank, 4, 0, 7 - rank % 2), rank=rank, world_size=4)
        steps_of_rank = epoch_of(rank, 4) + epoch_of(rank, 4, 1)[: 2 + rank]
        record(tmp_path / "between", *steps_of_rank, rank=rank, world_size=4)
    for rank in range(2):
        record(tmp_path / "within", *steps(rank, 2, 5, 10), rank=rank, world_size=2)
        record(tmp_path / "between", *epoch_of(rank, 2, 1), rank=rank, world_size=2)
    within, between = audit(tmp_path / "within", 80), audit(tmp_path / "between", SIZE)
    assert within.ok and between.ok, (within.problems, between.problems)
    assert [epoch.world_sizes for epoch in within.epochs] == [(4, 2)]
    assert [epoch.world_sizes for epoch in between.epochs] == [(4,), (2,)]
    assert all(epoch.is_complete for epoch in (*within.epochs, *between.epochs))


# --- digests --------------------------------------------------------------------------------------


def test_the_first_step_that_differs_is_found_by_halves(tmp_path):
    steps = epoch_of(0, 1, steps=40)
    record(tmp_path / "a", *steps)
    record(tmp_path / "b", *steps[:23], info_of(23, [*steps[23].keys[::-1]]), *steps[24:])
    (a,), (b,) = (audit(tmp_path / name).epochs for name in "ab")
    alike = [a.digest_of_first(n) == b.digest_of_first(n) for n in range(1, a.steps + 1)]
    assert alike == [True] * 23 + [False] * (a.steps - 23)
    with pytest.raises(ValueError, match="`steps`"):
        a.digest_of_first(-5)


def test_a_digest_is_of_keys_sources_repeats_fates_ranks_and_steps(tmp_path):
    runs = [
        [info_of(0, [1, 2], ends=True)],
        [info_of(0, [1, 3], ends=True)],
        [info_of(0, [2, 1], ends=True)],
        [info_of(0, [1, 2], sources=["", "a"], ends=True)],
        [info_of(0, [1, 2], sources=["", "b"], ends=True)],
        [info_of(0, [1, 2], repeats=[0, 1], ends=True)],
        [info_of(0, [1], left_out=[(2, "dropped")], ends=True)],
        [info_of(0, [1], left_out=[(2, "empty")], ends=True)],
        [info_of(0, [1]), info_of(1, [2], ends=True)],
        [info_of(0, [1, 2]), info_of(1, is_filler=True, ends=True)],
        [info_of(0, [1, 2]), info_of(1, ends=True)],
    ]
    for number, steps in enumerate(runs):
        record(tmp_path / str(number), *steps)
    digests = {audit(tmp_path / str(number)).epochs[0].digest for number in range(len(runs))}
    assert len(digests) == len(runs)


def test_a_digest_stays_as_it_is(tmp_path):
    """A digest of format version 2: people compare digests over versions of this library."""
    write_run(tmp_path, 2, epochs=1)
    assert audit(tmp_path).epochs[0].digest == (
        "3b547253f0a95efd9a1d70866004cf74f974f66acbdfba5ac72ad4d277e41d38"
    )
