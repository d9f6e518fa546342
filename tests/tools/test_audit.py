"""The audit of a ledger as a command."""

import pytest
from ledgers import SIZE, info_of, pieces_of, record, write_run

from odb_nodes import audit
from odb_nodes.tools.audit import main


def test_its_exit_code_tells_a_hole_and_an_open_run_from_what_is_whole(tmp_path, capsys):
    write_run(tmp_path, 2, kills=(5,))
    arguments = [str(tmp_path), "--size", str(SIZE)]
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{audit(tmp_path, SIZE)}\n"
    path = tmp_path / "rank-00001.ledger"
    pieces = pieces_of(path)
    path.write_bytes(b"".join(pieces[:-2] + pieces[-1:]))
    assert main(arguments) == 1
    text = "PROBLEM: rank 1: attempt 2, after epoch 1 step 6: the end of the attempt"
    assert text in capsys.readouterr().out
    record(tmp_path / "open", info_of(0, [0]), ended=False)
    assert main([str(tmp_path / "open"), "--size", "2"]) == 3
    assert "OPEN, no problem so far" in capsys.readouterr().out
    record(tmp_path / "open", info_of(1, [1], ends=True), ended=False)
    assert main([str(tmp_path / "open"), "--size", "2"]) == 0  # each sample has a fate
    assert "OK so far; no end is recorded" in capsys.readouterr().out


def test_sources_have_sizes_and_digests_are_of_the_first_steps(tmp_path, capsys):
    record(tmp_path / "mixed", info_of(0, [0, 1, 0], sources=["a", "a", "b=c"], ends=True))
    assert main([str(tmp_path / "mixed"), "--size", "a=2", "--size", "b=c=1"]) == 0
    assert main([str(tmp_path / "mixed"), "--size", "a=3", "--size", "b=c=1"]) == 1
    assert "1 of 3 samples of source 'a' have no fate: key 2." in capsys.readouterr().out
    write_run(tmp_path / "one", epochs=1)
    (epoch,) = audit(tmp_path / "one").epochs
    capsys.readouterr()
    for steps, text in (
        (3, f"epoch 0, first 3 steps: digest {epoch.digest_of_first(3)}"),
        (9, f"epoch 0, all 8 steps, of 9 asked for: digest {epoch.digest}"),
    ):
        assert main([str(tmp_path / "one"), "--steps", str(steps)]) == 0
        assert capsys.readouterr().out.endswith(f"\n{text}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((["--steps", steps], f"must be a number above 0, but is '{steps}'") for steps in "0x"),
        *((["--size", size], "--size") for size in ("x", "a=", "-3")),
        ([], "has no ledger"),
    ],
)
def test_what_is_wrong_has_an_exit_code_of_its_own(tmp_path, capsys, arguments, words):
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), *arguments])
    assert words in capsys.readouterr().err
