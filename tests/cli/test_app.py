"""What all commands have in common."""

import subprocess
import sys

import numpy as np
import pytest

from odb_nodes.cli import main
from odb_nodes.cli.app import COMMANDS
from odb_nodes.tools.length_table import LengthTable


def run(capsys, *arguments):
    """Exit code, standard output and standard error of a command."""
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    done = capsys.readouterr()
    return exit.value.code or 0, done.out, done.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    code, out, err = run(capsys, command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: odb-nodes {command}") and "--help" in out


def test_the_commands_are_listed(capsys):
    _, out, _ = run(capsys, "--help")
    assert all(f"  {command} " in out for command in COMMANDS)
    assert list(COMMANDS) == sorted(COMMANDS)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "text.jsonl").write_text('{"text": "a word"}\n')
    (tmp_path / "other.jsonl").write_text('{"words": "a word"}\n{"words": "more"}\n')
    (tmp_path / "odd.npz").write_bytes(b"odd")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate"], "pass either the data"),
        (["simulate", "text.jsonl", "--lengths", "odd.npz"], "They were both given"),
        (["simulate", "--lengths", "odd.npz", "--field", "x"], "leave out --tokenizer"),
        (["simulate", "text.jsonl", "--tokenizer", "nope.json"], "there is no tokenizer"),
        (["simulate", "nowhere.jsonl"], "there is no `nowhere.jsonl`"),
        (["simulate", "empty.jsonl"], "empty"),
        (["simulate", "text.jsonl"], "pass --tokenizer"),
        pytest.param(
            ["simulate", "text.jsonl", "--tokenizer", "nothing/here"],
            "tokenizer `nothing/here`",
            marks=pytest.mark.frameworks,
        ),
        (["simulate", "--lengths", "nowhere.npz"], "there is no `nowhere.npz`"),
        (["simulate", "--lengths", "odd.npz"], "no table of lengths"),
        (["simulate", "nowhere:make"], "no module `nowhere`"),
        (["simulate", "json:make"], "no function `make`"),
        (["simulate", "text.jsonl", "--cv", "1"], "in place of data: leave out the data"),
        (["simulate", "--cv", "1", "--lengths", "odd.npz"], "in place of data"),
        (["simulate", "--cv", "1", "--save-lengths", "l.npz"], "in place of data"),
        (["simulate", "--cv", "1", "--layout", "odd"], "`layout`"),
        (["simulate", "--cv", "1", "--weight", "a"], "source=number"),
        (["simulate", "--cv", "1", "--timeline", "no/where.svg"], "--timeline is in `no`"),
        (["profile", "--lengths", "nowhere.npz"], "there is no `nowhere.npz`"),
        (["profile", "text.jsonl", "--json", "no/where.json"], "make that folder first"),
        (["report", "nowhere", "--html", "no/where.html"], "make that folder first"),
        (["tune", "--lengths", "nowhere.npz"], "there is no `nowhere.npz`"),
        (["tune", "text.jsonl", "--memory-gib", "80"], "--memory-model FILE"),
        (["tune", "text.jsonl", "--memory-gib", "8", "--memory-model", "nix"], "nix"),
        (["inspect", "nowhere"], "there is no `nowhere`"),
        (["inspect", "text.jsonl"], "not a state file"),
        (["inspect", "."], "must hold one state of each rank"),
        (["inspect", "text.jsonl", "--diff", "nowhere"], "not a state file"),
        (["audit", "nowhere"], "nowhere"),
        (["audit", "nowhere", "--size", "x"], "--size"),
        (["step", "nowhere:make", "--checkpoint", "nowhere"], "no module `nowhere`"),
        (["step", "json:loads"], "--ledger FOLDER"),
        (["step", "json:loads", "--ledger", "x"], "--step"),
        (["step", "json", "--checkpoint", "x"], "module:function"),
        (["step", "json:loads", "--checkpoint", "nowhere"], "nowhere"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(capsys, files, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"odb-nodes {arguments[0]}: ") and words in line


def test_a_missing_extra_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    code, _, err = run(capsys, "--help")
    assert code == 2
    (line,) = err.splitlines()
    assert line.endswith("pip install 'odb-nodes[tools]'")


def test_importing_the_library_needs_nothing_of_the_extra():
    code = "import sys, odb_nodes, odb_nodes.cli, odb_nodes.tools.simulate, odb_nodes.tools.audit, "
    code += (
        "odb_nodes.tools.steps; print({'typer', 'rich', 'jinja2', 'matplotlib'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "set()\n", done.stderr


def test_the_module_is_the_command(tmp_path):
    LengthTable.of(np.arange(1, 50)).save(tmp_path / "lengths.npz")
    command = [sys.executable, "-m", "odb_nodes", "simulate", "--lengths", "lengths.npz"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "lengths of 49 samples" in done.stdout and "efficiency" in done.stdout
