"""Alignment with real processes over gloo."""

import pytest
from rank_jobs import run_ranks

SHAPES = {
    2: [[40, 40], [40, 41], [30, 90], [50, 0], [0, 1]],
    4: [[40] * 4, [41, 40, 40, 40], [30, 90, 30, 30], [40, 0, 40, 40], [1, 0, 0, 0]],
}


@pytest.mark.parametrize("world_size", SHAPES)
def test_equal_steps_and_every_sample_once(world_size, tmp_path):
    body = """
    for sizes in json.loads(sys.argv[1]):
        for options in ({}, {"read_ahead": 3}, {"accumulate": 3}):
            loader = r.make_loader(sizes[rank], **options)
            r.check_epochs(sizes, r.epochs_of(loader))
            loader.close()
    r.finish()
    """
    run_ranks(tmp_path, body, world_size, SHAPES[world_size])


@pytest.mark.parametrize("world_size", [2, 4])
def test_no_hang_whatever_the_seed(world_size, tmp_path, sampled):
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
    every = sampled(every=4).get("every", 1)
    run_ranks(tmp_path, body, world_size, every, timeout_s=200)


def test_stop_and_join(tmp_path):
    body = """
    sizes = [60, 90, 20]
    loader = r.make_loader(sizes[rank], uneven="join", read_ahead=2)
    for epoch in range(3):
        steps = [r.describe(batch) for batch in loader]
        assert r.real_ids(steps) == [1000 * rank + index for index in range(sizes[rank])]
        assert not any(is_filler for _, is_filler, *_ in steps)
        counts = r.gathered(len(steps))
    assert counts[1] > counts[0] > counts[2], counts
    loader.close()

    loader = r.make_loader(sizes[rank], uneven="stop", read_ahead=2)
    import warnings
    warnings.simplefilter("ignore")
    aligner = next(node for node in r.walk(loader.root) if isinstance(node, RankAligner))
    for epoch in range(3):
        steps = [r.describe(batch) for batch in loader]
        assert len({*r.gathered(len(steps))}) == 1
        left = aligner.unemitted_samples
        assert len(r.real_ids(steps)) + left == sizes[rank], (len(r.real_ids(steps)), left)
        assert left or rank == 2
    loader.close()
    r.finish()
    """
    run_ranks(tmp_path, body, 3)
