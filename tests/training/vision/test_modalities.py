"""Ranks agree on images: a step in which some have them must not leave the others behind."""

import pytest
from mixed_images import SIZES, write_chats
from rank_jobs import run_ranks
from vision_ranks import INDICES, TEXTS, WARM

COMPARE = "import vision_ranks as v; r.finish(v.compare(sys.argv[1]))"


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


# --- three sources in one graph: each once, in step, and resumed exactly --------------------------


def test_ranks_with_workers_agree_on_the_images_of_a_mixture(tmp_path):
    body = """
    import mixed_images
    from odb_nodes.testing import assert_resumes_exactly
    from odb_nodes.tools.source_report import SourceReport
    def make(num_workers=0):
        return mixed_images.make(sys.argv[1], num_workers=num_workers, timeout_s=60.0)
    report, rows = SourceReport(), []
    with make(num_workers=1) as loader:
        for batch in loader:
            info = pop_step_info(batch)
            report.add(info)
            rows.append({key: value.tolist() for key, value in batch.items()})
            assert r.gathered("pixel_values" in batch) == ["image" in info.modalities] * 2
    with make() as loader:
        for batch, row in zip(loader, rows, strict=True):
            pop_step_info(batch)
            assert {key: value.tolist() for key, value in batch.items()} == row
    assert_resumes_exactly(make, epochs=1, every=2, horizon=3, chain=1)
    images = [row["pixel_values"] for row in rows if "pixel_values" in row]
    with_dummy = sum(max(map(max, patches)) == 0 for patches in images)
    total = {name: count.samples for name, count in report.over_ranks().counts.items()}
    r.finish([total, with_dummy])
    """
    results = run_ranks(tmp_path, body, 2, write_chats(tmp_path / "chats.jsonl"), warm=WARM)
    assert [total for total, _ in results] == [SIZES] * 2
    assert sum(dummies for _, dummies in results) >= 1
