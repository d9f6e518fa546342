"""Ranks agree on images: a step in which some have them must not leave the others behind."""

import pytest
from rank_jobs import RankJob, run_ranks
from vision_ranks import INDICES, TEXTS, WARM

COMPARE = "import vision_ranks as v; r.finish(v.compare(sys.argv[1]))"
TRAIN_WITHOUT_DUMMY = """
    import vision_ranks as v
    r.finish(len(list(v.train("some", dummy=False, timeout_s=5))))
"""


@pytest.mark.parametrize("name", [*INDICES, "few packed"])
def test_ranks_without_images_take_part_and_change_nothing(name, tmp_path):
    kind = name.partition(" ")[0]
    indices = INDICES[kind]
    images, text = run_ranks(tmp_path, COMPARE, 2, name, warm=WARM)
    assert images["steps"] == text["steps"]
    assert images["without"] == text["without"]  # Both ranks use the vision tower, or none.
    assert text["dummies"] >= 2 and images["dummies"] == 0
    assert sorted(text["ids"]) == TEXTS[: len(indices[1])]
    assert sorted(images["ids"]) == sorted(indices[0])
    if kind == "few":
        assert images["fillers"] >= 2 and images["without"] >= 2
    assert max(images["error"], text["error"]) < 1e-6


def test_without_the_dummy_the_ranks_wait_for_each_other(tmp_path):
    with RankJob(tmp_path, TRAIN_WITHOUT_DUMMY, 2, warm=WARM) as job:
        results = job.results(60)
    assert all(code for code, _, _ in results)
    assert any("Timed out waiting 5000ms" in errors for _, _, errors in results), results
