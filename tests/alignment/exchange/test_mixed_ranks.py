"""Sources mixed on real ranks: shared out, counted, resumed; and ranks that have nothing."""

import pytest
from mixed_sources import SIZES, write_chats
from rank_jobs import RankJob, run_ranks


def test_every_step_resumes_with_workers_in_processes(tmp_path):
    body = """
    import mixed_sources as m
    from odb_nodes.testing import assert_resumes_exactly
    def make():
        return m.make(lambda: m.mixture(sys.argv[1]), num_workers=2, timeout_s=60.0)
    report = assert_resumes_exactly(make, chain=1)
    r.finish([report.steps, report.resumes])
    """
    for steps, resumes in run_ranks(tmp_path, body, 2, write_chats(tmp_path / "chats.jsonl")):
        assert resumes > steps > 10


def test_counts_by_source_add_up_over_ranks(tmp_path):
    body = """
    import mixed_sources as m
    from odb_nodes.tools.source_report import SourceReport
    report = SourceReport()
    for batch in (loader := m.make(lambda: m.mixture(sys.argv[1]), timeout_s=60.0)):
        info = pop_step_info(batch)
        report.add(info)
        of_sources = sum(count.samples for count in info.local_sources.values())
        assert of_sources == info.local_samples
        assert sum(r.gathered(of_sources)) == info.all_samples_this_step
    loader.close()
    total = report.over_ranks()
    r.finish([{name: count.samples for name, count in total.counts.items()}, report.state_dict()])
    """
    results = run_ranks(tmp_path, body, 2, write_chats(tmp_path / "chats.jsonl"))
    assert [total for total, _ in results] == [SIZES] * 2
    for name, size in SIZES.items():
        assert [own[name][0] for _, own in results] == [size // 2, size // 2]


def test_a_source_that_is_too_small_for_every_rank(tmp_path):
    body = """
    texts = [{"input_ids": [n] * (n % 7 + 1), "id": n} for n in range(30)]
    loader = ODBDataLoader({"many": texts[1:], "one": texts[:1]}, token_budget=16, window=4)
    r.finish([sorted(sum(r.gathered(r.real_ids([r.describe(b) for b in loader])), []))
              for _ in range(2)])
    """
    for found in run_ranks(tmp_path, body, 2):
        assert found == [[*range(30)]] * 2


@pytest.mark.parametrize("kind", ["list", "jsonl", "mixed"])
def test_a_rank_whose_dataset_is_empty(kind, tmp_path):
    body = """
    samples = r.samples_of(rank, [40, 0][rank])
    if sys.argv[1] == "jsonl":
        path = sys.argv[2] + str(rank)
        with open(path, "w") as file:
            file.writelines(json.dumps(sample) + "\\n" for sample in samples)
        def dataset():
            return JsonlSource(path, 0, 1)
    else:
        def dataset():
            return {"only": samples} if sys.argv[1] == "mixed" else samples
    def make():
        return ODBDataLoader(
            dataset(), token_budget=60, window=8, round_size=4, sharded=True, timeout_s=60.0
        )
    loader, states, events = make(), [], []
    for _ in range(2):
        for batch in loader:
            events.append(r.describe(batch))
            states.append(loader.state_dict())
    steps = len(events) // 2
    r.check_epochs([40, 0], [events[:steps], events[steps:]])
    for start in (0, 3, 5, steps - 2, steps + 2):
        resumed = make()
        resumed.load_state_dict(states[start])
        got = [r.describe(batch) for batch in resumed]
        assert got == events[start + 1:][:len(got)] and got, start
        resumed.close()
    r.finish(sum(is_filler for _, is_filler, *_ in events))
    """
    fillers = run_ranks(tmp_path, body, 2, kind, tmp_path / "data")
    assert fillers[0] == 0
    assert fillers[1] > 10


def test_where_all_ranks_are_empty_all_say_so(tmp_path):
    body = """
    loader = ODBDataLoader([], token_budget=60, sharded=True, timeout_s=60.0)
    try:
        list(loader)
    except SampleError as error:
        r.finish(str(error))
    """
    with RankJob(tmp_path, body, 2) as job:
        for out in job.finish():
            assert "no rank has a sample in epoch 0" in out


def test_an_empty_dataset_that_ranks_share_is_an_error(tmp_path):
    body = """
    try:
        ODBDataLoader([], token_budget=60)
    except ValueError as error:
        r.finish(str(error))
    """
    for error in run_ranks(tmp_path, body, 2):
        assert "`dataset` must have at least 1 sample, but is empty" in error
