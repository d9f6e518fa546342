"""What works where the extra `tools` is not installed."""

import subprocess
import sys

BLOCKED = """
import runpy, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jinja2", "matplotlib", "rich", "tensorboard", "typer"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from odb_nodes import *
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__")
"""


HELP = """
import sys
from odb_nodes.cli import main
for line in ("--help", "profile --help", "step --help", "audit --help", "profile --rank 8",
             "simulate", "tune --lengths no.npz", "inspect", "step x", "profile no.jsonl"):
    try:
        main(line.split())
    except SystemExit as exit:
        assert exit.code in (0, 2) and "torch" not in sys.modules, line
import odb_nodes
assert odb_nodes.__version__ and "torch" not in sys.modules
assert {"Loader", "__version__"} <= {*dir(odb_nodes)} and not hasattr(odb_nodes, "Nothing")
assert odb_nodes.Loader is odb_nodes.loader.Loader and "torch" in sys.modules
"""


def test_help_and_errors_of_usage_need_no_torch():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def run(module, *arguments):
    """`python -m module`, without the packages of the extra."""
    command = [sys.executable, "-c", BLOCKED, module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_a_job_is_simulated():
    done = run("odb_nodes.tools.simulate", "--ranks", 1, 2, "--samples-per-rank", 90)
    assert done.returncode == 0, done.stderr
    ranks = [line.split("|")[2].strip() for line in done.stdout.splitlines()[2:]]
    assert ranks == ["1", "2"]


def test_the_command_says_in_one_line_what_to_install():
    done = run("odb_nodes", "profile", "data.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("odb-nodes: ") and line.endswith("pip install 'odb-nodes[tools]'")
