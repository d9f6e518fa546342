"""Options, help and errors of all commands."""

import subprocess
import sys

import numpy as np
import pytest
from monitors import loader_of, train

from odb_nodes.cli import main
from odb_nodes.cli.app import COMMANDS as FUNCTIONS
from odb_nodes.tools.lengths import LengthTable
from odb_nodes.training.monitor import Monitor

COMMANDS = [function.__name__ for function in FUNCTIONS]


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
    assert out.lower().startswith(f"usage: odb-nodes {command}") and "--help" in out


def test_the_commands_are_listed_and_another_is_an_error_in_one_line(capsys):
    _, out, _ = shown = run(capsys, "--help")
    assert all(f"  {command} " in out for command in COMMANDS)
    assert sorted(COMMANDS) == COMMANDS
    assert run(capsys) == shown
    code, out, err = run(capsys, "improve")
    assert (code, out) == (2, "") and err.startswith("odb-nodes: argument COMMAND: invalid choice")
    assert err.endswith(" See `odb-nodes --help`.\n") and err.count("\n") == 1


USERS = """
def nothing(*_): return None
def value(*_): raise ValueError("my value")
def key(*_): return {}["my key"]
def budget(*_):
    from odb_nodes import ODBDataLoader
    return ODBDataLoader([{"input_ids": [1]}], token_budget=0)
class Dataset:
    def __len__(self): return 4
    def __getitem__(self, index): return {"input_ids": {}["my key"]}
number = 3
def needs(path): return []
def calls(*_): return needs()
def source(*_):
    from odb_nodes import JsonlSource
    return JsonlSource("data/ids.jsonl", 0, 1)
def loader(*_):
    from odb_nodes import ODBDataLoader
    return ODBDataLoader({"a": source()}, token_budget=9)
def compiled(*_): return __import__("numpy").random.default_rng(-1)
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "text.jsonl").write_text('{"text": "a word"}\n')
    (tmp_path / "other.jsonl").write_text('{"words": "a word"}\n{"words": "more"}\n')
    (tmp_path / "broken.jsonl").write_text("words")
    (tmp_path / "labels.jsonl").write_text('{"input_ids": [1, 2], "labels": [1]}\n')
    (tmp_path / "odd.npz").write_bytes(b"odd")
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1, 2]}\n')
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)))
    (tmp_path / "link.jsonl").symlink_to("ids.jsonl")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "ids.jsonl").write_text('{"input_ids": [1, 2]}\n')
    (tmp_path / "data" / "state.txt").touch()
    (tmp_path / "data" / "deep").mkdir()
    (tmp_path / "data" / "deep" / "kept.txt").touch()
    (tmp_path / "users.py").write_text(USERS)
    monkeypatch.delitem(sys.modules, "users", raising=False)
    return tmp_path


WRONG = [
    ("simulate", "or one of --lengths, --cv in place of them. See `odb-nodes simulate --help`"),
    ("profile", "or --lengths in place of them. See `odb-nodes profile --help`"),
    ("simulate text.jsonl --lengths odd.npz", "pass either the data"),
    (
        "simulate --lengths odd.npz --field x",
        "samples of a file. See `odb-nodes simulate --help`",
    ),
    ("simulate text.jsonl --tokenizer nope.json", "`nope.json` cannot be loaded"),
    ("simulate text.jsonl --tokenizer binary", "`binary` cannot be loaded"),
    ("simulate nowhere.jsonl", "there is no `nowhere.jsonl`"),
    ("simulate empty.jsonl", "empty"),
    (
        "simulate text.jsonl",
        "has no `input_ids`, but ['text']: pass --tokenizer, or module:function that returns a "
        "loader with your `process_fn`.",
    ),
    (
        "simulate other.jsonl",
        "it has no 'messages' or 'text' or 'input_ids', but ['words']: pass --tokenizer, or",
    ),
    ("profile ids.jsonl text.jsonl", "arguments: text.jsonl (quote a pattern of files). See `od"),
    ("profile ids.jsonl text", "arguments: text. See `odb-nodes profile --help`"),
    ("simulate broken.jsonl", "is not valid JSON in UTF-8: Expecting value at character 1."),
    ("simulate labels.jsonl", "`labels` must have the length of `input_ids` (2), but has 1"),
    ("simulate --lengths odd.npz", "no table of lengths"),
    ("simulate --lengths .", "Is a directory: '.'"),
    ("simulate --cv 1 --layout odd", "`layout`"),
    ("simulate --cv 1 --weight a", "--weight: must be source=number"),
    ("profile ids.jsonl --html no/where.html", "'--html': there is no folder"),
    ("profile ids.jsonl --html .", "`.` is a folder: name a file in it"),
    ("simulate --cv -1", "argument --cv: must be a number of at least 0"),
    ("simulate --cv abc", "argument --cv: must be a number of at least 0, but is 'abc'"),
    ("simulate users:nothing", "`users:nothing` must return a dataset or a loader"),
    (
        "simulate users:needs",
        "`users:needs` must take no argument and return a dataset or a loader: needs() missing 1 "
        "required positional argument: 'path'.",
    ),
    (
        "simulate users:calls",
        "missing 1 required positional argument: 'path' ({here}/users.py, line 13)",
    ),
    ("simulate users.py:source", "write `users:source` (module:function)"),
    ("profile users.py", "write `users:make_loader` (module:function)"),
    ("inspect . --step 3 --loader jobs/users.py:loader", "write `jobs.users:loader`"),
    ("simulate users:loader --tokenizer x", "--field. See `odb-nodes simulate --help`"),
    ("simulate users:value", "ValueError: my value ({here}/users.py, line 3)"),
    ("simulate users:key", "KeyError: 'my key' ({here}/users.py, line 4)"),
    ("simulate users:Dataset", "KeyError: 'my key' ({here}/users.py, line 10)"),
    ("simulate users:compiled", "non-negative integer ({here}/users.py, line 20)"),
    ("simulate users:budget", "instead. ({here}/users.py, line 7)"),
    ("profile --lengths nowhere.npz", "--lengths: there is no 'nowhere.npz'"),
    ("profile text.jsonl --rank 8", "See `odb-nodes profile --help`"),
    ("tune ids.jsonl --log binary", "must have at least 8 lines"),
    ("tune text.jsonl --ranks many", "whole number of at least 1, but is 'many'"),
    ("audit", "required: folder. See `odb-nodes audit --help`"),
    ("inspect text.jsonl", "not a state file"),
    ("inspect .", "has no states, but folders ['data']"),
    ("inspect text.jsonl --diff nowhere", "--diff: there is no 'nowhere'"),
    ("inspect . --loader json:loads", "--out with both. See `odb-nodes inspect --help`"),
    ("inspect . --step 3", "pass --step and --loader"),
    ("inspect . --out x", "and --out with both"),
    ("inspect . --step 3 --loader nowhere:make", "No module named 'nowhere'"),
    ("inspect binary --step 3 --loader json:loads", "not a state file"),
    ("inspect . --step 3 --loader json", "module:function"),
    ("inspect . --step 3 --loader users:number", "no function `number`"),
]


@pytest.mark.parametrize(("line", "words"), WRONG)
def test_what_is_wrong_is_said_in_one_line(capsys, files, line, words):
    code, out, err = run(capsys, *line.split())
    assert (code, out) == (2, "")
    (said,) = err.splitlines()
    assert said.startswith(f"odb-nodes {line.split()[0]}: ")
    assert words.format(here=files).lower() in said.lower()


def test_a_page_without_plotly_is_an_error_before_the_work(capsys, files, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    code, out, err = run(capsys, *"profile ids.jsonl --html page.html".split())
    assert (code, out) == (2, "") and "pip install 'odb-nodes[report]'" in err


def test_a_seed_may_be_negative(capsys):
    code, _, err = run(capsys, *"simulate --cv 0.5 --samples 50 --seed -1".split())
    assert (code, err) == (0, "")


def test_what_is_wrong_with_the_library_itself_is_a_traceback(monkeypatch):
    monkeypatch.setattr("odb_nodes.tools.inspection.read_inspections", {}.__getitem__)
    with pytest.raises(KeyError):
        main(["inspect", "."])


READ_OR_TWICE = [
    "profile ids.jsonl --save-lengths ids.jsonl",
    "profile ids.jsonl --json link.jsonl",
    "profile i*.jsonl --html ids.jsonl",
    "profile ids.jsonl --json new --html ./new",
    "profile text.jsonl --tokenizer odd.npz --json odd.npz",
    "simulate --lengths odd.npz --save-lengths odd.npz",
    "tune ids.jsonl --log data --save-lengths data/ids.jsonl",
    "profile data --json data/state.txt",
    "profile data --json data/deep/kept.txt",
    "profile users:source --json users.py",
    "profile users:source --json data/ids.jsonl",
    "simulate users:loader --save-lengths data/ids.jsonl",
    "report data --html data/ids.jsonl",
    "inspect data --step 0 --loader users:loader --out users.py",
    "inspect data --step 0 --loader json:loads --out data/ids.jsonl",
]
EXISTS = [
    "profile ids.jsonl --json odd.npz",
    "report data --csv odd.npz",
    "inspect data --step 0 --loader json:loads --out odd.npz",
]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        *((f"{line} --force", "is also read, or written twice") for line in READ_OR_TWICE),
        *((line, "exists: name another file, or pass --force") for line in EXISTS),
    ],
)
def test_no_file_is_lost(capsys, files, line, words):
    def content():
        paths = [path for path in files.rglob("*.*") if path.is_file()]
        return {path: path.read_bytes() for path in paths if path.suffix != ".pyc"}

    before = content()
    code, _, err = run(capsys, *line.split())
    assert code == 2 and words in err
    assert content() == before


def test_a_file_is_replaced_where_that_is_asked_for(capsys, files):
    assert run(capsys, "profile", "ids.jsonl", "--json", "odd.npz", "--force")[0] == 0
    assert (files / "odd.npz").read_text().startswith("{")


@pytest.mark.slow
def test_the_module_is_the_command(tmp_path):
    LengthTable.of(np.arange(1, 50)).save(tmp_path / "lengths.npz")
    command = [sys.executable, "-m", "odb_nodes", "simulate", "--lengths", "lengths.npz"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "lengths of 49 samples" in done.stdout and "efficiency" in done.stdout


@pytest.mark.slow
def test_a_warning_is_a_line_that_names_the_command(tmp_path):
    with Monitor(tmp_path / "run", every=1) as writer:
        train(writer, loader_of(), steps=3)
    lines = (records := tmp_path / "run" / "monitor.jsonl").read_text().splitlines()
    records.write_text("\n".join([*lines[:2], "garbage", *lines[2:], ""]))
    command = [sys.executable, "-m", "odb_nodes", "report", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert (
        "odb-nodes report: lines of `run/monitor.jsonl` are damaged" in done.stderr.splitlines()[0]
    )
    assert "UserWarning" not in done.stderr and "sys.exit" not in done.stderr
