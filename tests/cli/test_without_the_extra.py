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
import odb_nodes
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__")
"""


def run(module, *arguments):
    """`python -m module`, without the packages of the extra."""
    command = [sys.executable, "-c", BLOCKED, module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_a_job_is_simulated():
    done = run("odb_nodes.tools.simulate", "--ranks", 1, 2, "--samples-per-rank", 90)
    assert done.returncode == 0, done.stderr
    assert [line[:9] for line in done.stdout.splitlines()[2:]] == ["| 1.0 | 1", "| 1.0 | 2"]


def test_a_step_is_asked_for():
    done = run("odb_nodes.tools.steps", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: odb_nodes.tools.steps ")


def test_the_command_says_in_one_line_what_to_install():
    done = run("odb_nodes", "profile", "data.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("odb-nodes: ") and line.endswith("pip install 'odb-nodes[tools]'")
