"""Alignment with real processes over gloo."""

from collections import Counter

import pytest
from rank_jobs import run_ranks
from worker_functions import SkipSome

SHAPES = {
    2: [[40, 41], [30, 90], [50, 0], [0, 1]],
    4: [[41, 40, 40, 40], [30, 90, 30, 30], [40, 0, 40, 40], [1, 0, 0, 0]],
}


@pytest.mark.parametrize("world_size", SHAPES)
def test_equal_steps_and_every_sample_once(world_size, tmp_path):
    body = """
    for sizes in json.loads(sys.argv[1]):
        for options in ({"read_ahead": 3}, {"accumulate": 3}):
            loader = r.make_loader(sizes[rank], **options)
            r.check_epochs(sizes, r.epochs_of(loader))
            loader.close()
    r.finish()
    """
    run_ranks(tmp_path, body, world_size, SHAPES[world_size])


def test_no_hang_whatever_the_seed(tmp_path, sampled):
    # Any shards, budgets and rounds; ranks of different speed; epochs that are left at any step.
    body = """
    for seed in range(0, 50, int(sys.argv[1])):
        draw = random.Random(seed)  # the same on all ranks
        sizes = [draw.choice([0, 1, draw.randrange(100)]) for _ in range(world_size)]
        sizes[draw.randrange(world_size)] += 1
        loader = r.make_loader(
            sizes[rank],
            seed=seed,
            budget=draw.randrange(30, 150),
            window=draw.randrange(1, 30),
            round_size=draw.randrange(1, 40),
            accumulate=draw.randrange(1, 4),
            read_ahead=draw.randrange(3),
        )
        for stop in draw.sample(range(20), 3):
            for step, batch in enumerate(loader):
                time.sleep(random.random() / 1000)
                if step == stop:
                    break
        r.check_epochs(sizes, r.epochs_of(loader, 1))
        loader.close()
    r.finish()
    """
    run_ranks(tmp_path, body, 4, sampled(every=5).get("every", 1), timeout_s=200)


def test_samples_of_mixed_sources_come_once_or_are_counted_as_skipped(tmp_path):
    body = """
    import worker_functions as w
    from odb_nodes.tools.source_report import SourceReport
    sources = {"many": range(90), "one": [91]}  # one rank has nothing of the second
    options = {"token_budget": 96, "window": 8, "round_size": 4, "num_workers": 1}
    with ODBDataLoader(sources, process_fn=w.SkipSome(), **options) as loader:
        for epoch in range(2):
            report, ids = SourceReport(), []
            for batch in loader:
                info = pop_step_info(batch)
                report.add(info)
                assert sum(r.gathered(info.local_samples)) == info.all_samples_this_step
                ids += [] if info.is_filler else batch["id"].tolist()
            counts = {name: one.samples for name, one in report.over_ranks().counts.items()}
            assert r.gathered(counts) == [counts] * 2
    r.finish([sorted(sum(r.gathered(ids), [])), loader.skipped_samples, counts])
    """
    kept = [index for index in [*range(90), 91] if SkipSome().reason(index) is None]
    reasons = Counter(filter(None, map(SkipSome().reason, range(90))))
    first, second = run_ranks(tmp_path, body, 2)
    assert first[0] == second[0] == kept
    assert Counter(first[1]) + Counter(second[1]) == reasons
    assert first[2] == {"many": len(kept) - 1, "one": 1}
