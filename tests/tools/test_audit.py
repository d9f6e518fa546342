"""The audit of a ledger as a command."""

import subprocess
import sys

import pytest
from ledgers import SIZE, info_of, pieces_of, write_run

from odb_nodes import Ledger, audit
from odb_nodes.tools.audit import main


@pytest.mark.slow
def test_it_exits_with_1_on_a_hole(tmp_path):
    write_run(tmp_path, 2, kills=(5,))
    command = [sys.executable, "-m", "odb_nodes.tools.audit", str(tmp_path), "--size", str(SIZE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, f"{audit(tmp_path, SIZE)}\n"), done.stderr
    path = tmp_path / "rank-00001.ledger"
    pieces = pieces_of(path)
    path.write_bytes(b"".join(pieces[:-2] + pieces[-1:]))
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "PROBLEM: rank 1: attempt 2, after epoch 1 step 6: the end of the attempt" in done.stdout


def test_a_run_without_an_end_has_an_exit_code_of_its_own(tmp_path, capsys):
    ledger = Ledger(tmp_path)
    ledger.record(info_of(0, [0]))
    assert main([str(tmp_path), "--size", "2"]) == 3
    assert "OPEN, no problem so far" in capsys.readouterr().out
    ledger.record(info_of(1, [1], ends=True))
    assert main([str(tmp_path), "--size", "2"]) == 0  # each sample of its epochs has a fate
    assert "OK so far; no end is recorded" in capsys.readouterr().out
    assert main([str(tmp_path), "--size", "3"]) == 1
    ledger.close()
    assert main([str(tmp_path), "--size", "2", "--steps", "1"]) == 0


def test_sizes_are_those_of_the_sources(tmp_path, capsys):
    with Ledger(tmp_path) as ledger:
        ledger.record(info_of(0, [0, 1, 0], sources=["a", "a", "b=c"], ends=True))
    assert main([str(tmp_path), "--size", "a=2", "--size", "b=c=1"]) == 0
    assert main([str(tmp_path), "--size", "a=3", "--size", "b=c=1"]) == 1
    assert "1 of 3 samples of source 'a' have no fate: key 2." in capsys.readouterr().out


def test_the_digest_of_the_first_steps(tmp_path, capsys):
    write_run(tmp_path, epochs=1)
    assert main([str(tmp_path), "--steps", "3"]) == 0
    digest = audit(tmp_path).epochs[0].digest_of_first(3)
    assert capsys.readouterr().out.endswith(f"\nepoch 0, first 3 steps: digest {digest}\n")
    assert main([str(tmp_path), "--steps", "9"]) == 0
    whole = f"\nepoch 0, all 8 steps, of 9 asked for: digest {audit(tmp_path).epochs[0].digest}\n"
    assert capsys.readouterr().out.endswith(whole)


@pytest.mark.parametrize("steps", ["-5", "0", "1.5", "x"])
def test_a_number_of_steps_that_is_none_is_refused(tmp_path, steps, capsys):
    write_run(tmp_path, epochs=1)
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--steps", steps])
    assert f"--steps: must be a number above 0, but is '{steps}'." in capsys.readouterr().err
    with pytest.raises((TypeError, ValueError), match="`steps`"):
        audit(tmp_path).epochs[0].digest_of_first(-5)


@pytest.mark.parametrize("size", ["x", "a=", "1.5", "-3"])
def test_a_size_that_is_none_is_refused(tmp_path, size, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--size", size])
    assert "--size" in capsys.readouterr().err


def test_a_folder_without_a_ledger_has_another_exit_code_than_a_hole(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main([str(tmp_path)])
    assert left.value.code == 2
    assert "has no ledger" in capsys.readouterr().err
