"""Ranks that skip different numbers of samples take the same steps, and lose none."""

from collections import Counter

from rank_jobs import run_ranks
from worker_functions import SkipSome

JOB = """
    import worker_functions as w
    loader = r.ODBDataLoader(
        range(90), token_budget=96, window=8, round_size=4, process_fn=w.SkipSome(), num_workers=1
    )
    with loader:
        epochs = [[r.describe(batch) for batch in loader], loader.skipped_samples]
        epochs += [[r.describe(batch) for batch in loader], loader.skipped_samples]
    r.finish(epochs)
"""


def test_every_sample_comes_out_once_or_is_counted_on_one_rank(tmp_path):
    reasons = [SkipSome().reason(index) for index in range(90)]
    found = run_ranks(tmp_path, JOB, 2)
    for epoch in (0, 2):
        ranks = [of_rank[epoch : epoch + 2] for of_rank in found]
        assert len({len(steps) for steps, _ in ranks}) == 1
        ids = [
            index for steps, _ in ranks for ids, filler, *_ in steps if not filler for index in ids
        ]
        assert sorted(ids) == [index for index in range(90) if reasons[index] is None]
        counted = sum((Counter(skipped) for _, skipped in ranks), Counter())
        assert counted == Counter(reason for reason in reasons if reason is not None)
