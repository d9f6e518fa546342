"""Inspections of the states of real loaders."""

import warnings

import pytest
import torch
from aligned_ranks import on_ranks
from refusals import refuses

from odb_nodes import (
    Checkpoints,
    Mixing,
    ODBDataLoader,
    SourceCount,
    StateError,
    pop_step_info,
    save_state,
)
from odb_nodes.tools.inspection import differences, inspect_state, misfits, read_inspections
from odb_nodes.tools.source_report import SourceReport

DATASET = [{"input_ids": [1] * (n % 50 + 1)} for n in range(400)]
OPTIONS = {"token_budget": 300, "window": 20, "seed": 0}


def states(world_size, steps, dataset=DATASET, **options):
    """The state of each rank after some steps."""

    def run(exchange):
        keywords = {**OPTIONS, "round_size": 8, "process_group": exchange, **options}
        loader = ODBDataLoader(dataset, **keywords)
        batches = iter(loader)
        for _ in range(steps):
            next(batches, None)
        return loader.state_dict()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of so small a pool
        return on_ranks(world_size, run)


def test_a_state_says_where_it_stands():
    loader = ODBDataLoader(DATASET, **OPTIONS)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    inspection = inspect_state(loader.state_dict())
    facts = inspection.facts
    assert (facts["epoch"], facts["step"], facts["yielded"]) == ("0", "5", "5")
    assert facts["samples"] == str(loader.samples_done)
    bucketer = loader._graphs[0].bucketer
    assert sorted(inspection.pool.tolist()) == sorted(bucketer.planner.pool.table()[0].tolist())
    assert inspection.config["WindowBucketer"]["window"] == 20
    assert inspection.config["ShardedSampler"]["size"] == 400
    assert inspection.damage == ""
    text = str(inspection)
    assert f"pool: {len(inspection.pool)} samples" in text and "####" in text
    assert "  WindowBucketer: budget.tokens 300" in text


def test_a_pool_that_is_stored_whole_is_read_too_and_at_the_end_there_is_none():
    (state,) = states(1, 3, state="payload")
    inspection = inspect_state(state)
    pool = [*inspection.pool, *inspection.planned]
    assert len(pool) == len(state["root"]["source"]["source"]["held"][4]) > 10
    assert {*pool} <= {*range(1, 51)}
    text = str(inspect_state(*states(1, 1_000)))
    assert "epoch ended" in text and "pool: no samples" in text


def test_sources_of_a_mixture_are_told_apart():
    dataset = {"a": DATASET, "b": DATASET[:90]}
    (state,) = states(1, 4, dataset, weights=Mixing(weights={"a": 1, "b": 2}))
    inspection = inspect_state(state)
    sizes = [inspection.config[f"{name}.ShardedSampler"]["size"] for name in "ab"]
    assert sizes == [400, 90]
    assert sum(int(part.split()[0]) for part in inspection.facts["mixture"].split(", ")) > 20
    places = [place for place in inspection.values if place.endswith("ShardedSampler.position")]
    assert places == ["a.ShardedSampler.position", "b.ShardedSampler.position"]


def test_damage_is_named():
    (state,) = states(1, 3)
    inspection = inspect_state(state | {"num_yielded": 4})
    assert "digest" in inspection.damage and str(inspection).startswith("DAMAGED")
    assert misfits([inspection]) == [f"rank 0: {inspection.damage}"]


def test_ranks_of_one_step_fit_and_others_are_named():
    for steps in (0, 9, 1_000):
        assert misfits([*map(inspect_state, states(3, steps))]) == []
    sharded = states(2, 5, DATASET[:150], sharded=True)
    assert misfits([*map(inspect_state, sharded)]) == []
    early, late, seeded = states(2, 8), states(2, 11), states(2, 8, seed=1)
    for ranks, text in (
        ([early[0], late[1]], "rank 1: step 11, but 8 on rank 0"),
        ([early[0], early[0]], "rank 1: RankAligner has `rank` 0"),
        ([early[0]], "rank 0: saved by 2 ranks, not 1"),
        ([early[0], seeded[1]], "rank 1: RankAligner has `seed` 1"),
        ([early[0], seeded[1]], "another plan of the round"),
    ):
        assert any(text in line for line in misfits([*map(inspect_state, ranks)])), text


def test_what_differs_is_named_by_its_place():
    (first,), (second,) = states(1, 3), states(1, 5, window=30)
    lines = differences(inspect_state(first), inspect_state(second))
    assert "WindowBucketer config.window: 20 -> 30" in lines
    assert "GroupCollator.step: 3 -> 5" in lines
    assert any(line.startswith("RankAligner.groups") for line in lines)
    assert not any("b'" in line or 'b"' in line for line in lines)  # sizes and digests, no bytes
    assert differences(inspect_state(first), inspect_state(first)) == []


def test_the_newest_whole_checkpoint_of_a_folder_is_read(tmp_path):
    loader = ODBDataLoader(DATASET, **OPTIONS)
    parts = {"model": torch.nn.Linear(2, 2), "loader": loader}
    checkpoints = Checkpoints(tmp_path, parts, keep=3)
    checkpoints.load()
    for step, _ in zip(range(1, 4), loader, strict=False):
        checkpoints.save(step)
    name, (inspection,) = read_inspections(tmp_path)
    assert name.startswith(str(tmp_path)) and "-step-3-" in name
    assert inspection.facts["step"] == "3"
    first_folder = next(path for path in tmp_path.iterdir() if "-step-1-" in path.name)
    assert read_inspections(first_folder)[1][0].facts["step"] == "1"
    assert read_inspections(next(first_folder.iterdir()))[1][0].facts["step"] == "1"


def test_what_is_no_state_is_an_error(tmp_path):
    save_state({"weights": [1]}, tmp_path / "model.pt")
    (tmp_path / "run").mkdir()
    incomplete = tmp_path / "job" / "000001-step-5-01234567"
    incomplete.mkdir(parents=True)
    save_state({}, incomplete / "rank00000-of-00002.pt")
    (tmp_path / "some").mkdir()
    for rank, state in enumerate(states(2, 3)):
        save_state(state, tmp_path / "some" / f"odb_nodes-rank{rank:05d}-of-00003.pt")
    for name, error, match in (
        ("nowhere.pt", FileNotFoundError, None),
        ("model.pt", StateError, "holds no state of a loader"),
        ("run", FileNotFoundError, "has no states: pass the folder"),
        ("some", StateError, r"lacks the states of ranks \[2\]"),
        ("job", StateError, "missing ranks"),
    ):
        with pytest.raises(error, match=match):
            read_inspections(tmp_path / name)


# --- source report --------------------------------------------------------------------------------


DATA = {
    "short": [{"input_ids": [1] * 2} for _ in range(30)],
    "long": [{"input_ids": [1] * 8} for _ in range(10)],
}


def infos():
    loader = ODBDataLoader(DATA, token_budget=32, window=8, weights={"short": 3, "long": 1})
    return [pop_step_info(batch) for batch in loader]


def reported(steps):
    report = SourceReport()
    for info in steps:
        report.add(info)
    return report


def test_it_adds_up_what_steps_have_had_and_goes_on_from_a_checkpoint():
    steps = infos()
    first, report = reported(steps[:2]), SourceReport()
    report.load_state_dict(first.state_dict())
    for info in steps[2:]:
        report.add(info)
    assert report.counts == {"short": SourceCount(30, 60), "long": SourceCount(10, 80)}
    assert report.shares() == {"short": 0.75, "long": 0.25}
    assert report.shares("tokens") == pytest.approx({"short": 3 / 7, "long": 4 / 7})
    assert first.counts == reported(steps[:2]).counts
    assert report.over_ranks().counts == report.counts
    loader = ODBDataLoader(DATA["long"], token_budget=32)
    assert reported(pop_step_info(batch) for batch in loader).counts == {}


def test_its_table_shows_shares_beside_weights():
    def cells(report, weights):
        lines = report.table(weights).splitlines()
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]

    head, _, long, short = cells(reported(infos()), {"short": 3, "long": 1})
    assert head == ["source", "samples", "of samples", "tokens", "of tokens", "weight"]
    assert long == ["long", "10", "25.00%", "80", "57.14%", "25.00%"]
    assert short == ["short", "30", "75.00%", "60", "42.86%", "75.00%"]
    assert str(SourceReport()) == "no samples of any source so far"
    (*_, line, _) = cells(SourceReport(), {"short": 3, "long": 1})  # has had nothing yet
    assert line == ["long", "0", "0.00%", "0", "0.00%", "25.00%"]


REFUSALS = [
    (lambda: reported(infos()).table(3), TypeError, "`weights` must be a dict"),
    (lambda: reported(infos()).table({"short": 1}), ValueError, "`weights` must have the names"),
    (lambda: SourceReport().add({"input_ids": []}), TypeError, "`info` must be a `StepInfo`"),
]
test_what_is_wrong_is_refused = refuses(REFUSALS)
