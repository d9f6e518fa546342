"""Programs that begin with their imports done: forked from a process that has done them once.

To import torch takes a rank two seconds of a core, and transformers takes it six. A program that is
forked is a process of its own as any other, but it shares the seed of `hash` with the others, and
what its modules drew at random as they were imported. With `--exhaustive` no program is forked.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

_REQUEST_BYTES = 1 << 20


class ForkedProgram:
    """What `subprocess.Popen` is to a program that was started; the part of it that tests use.

    Args:
        pid: process id, which is that of its session, too.
        stdout: what it prints, as text.
        stderr: what it complains, as text.
        status: where its exit code will be.
    """

    def __init__(self, pid, stdout, stderr, status):
        self.pid, self.stdout, self.stderr, self._status = pid, stdout, stderr, status
        self.returncode = None

    def wait(self, timeout=None):
        """The exit code, negative for a signal; TimeoutExpired after so many seconds."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"program {self.pid}", timeout)
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def communicate(self, timeout):
        """All that is left of its output and complaints, once it has ended."""
        end = time.monotonic() + timeout
        output = {}

        def read(name):
            output[name] = getattr(self, name).read()

        threads = [
            threading.Thread(target=read, args=(name,), daemon=True)
            for name in ("stdout", "stderr")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(f"program {self.pid}", timeout)
        self.wait(max(0.0, end - time.monotonic()))
        return output["stdout"], output["stderr"]

    def send_signal(self, number):
        os.kill(self.pid, number)


class WarmProcess:
    """A process that has imported `modules`, and forks programs."""

    def __init__(self, modules):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):  # a whole environment in one message
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
        command = [sys.executable, __file__, str(theirs.fileno()), *modules]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        atexit.register(self.close)

    def close(self):
        self._socket.close()
        self._process.wait(10)

    def start(self, arguments, environment):
        """Fork a program: a file, what its command line has after it, and all of its variables."""
        pipes = [os.pipe() for _ in range(3)]
        request = json.dumps([list(map(str, arguments)), environment]).encode()
        socket.send_fds(self._socket, [request], [end for _, end in pipes])
        for _, end in pipes:
            os.close(end)
        stdout, stderr, status = [open(end) for end, _ in pipes]
        return ForkedProgram(int(status.readline()), stdout, stderr, status)


@functools.cache
def warm_process(modules):
    """The one process of this test run that has these modules."""
    return WarmProcess(modules)


# --- in the process that has the modules ----------------------------------------------------------


def serve(requests):
    """Fork a program for each request. Returns its file and arguments, in the program."""
    ends = {}  # by descriptor of a process: its id, and where its exit code goes
    while True:
        ready, *_ = select.select([requests, *ends], [], [])
        for process in ready:
            if process is not requests:
                pid, status = ends.pop(process)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(status, b"%d\n" % code)
                os.close(status)
                os.close(process)
        if requests in ready:
            message, descriptors, *_ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
            if not message:
                sys.exit()
            pid = os.fork()
            if pid == 0:
                for inherited in (*ends, *(status for _, status in ends.values())):
                    os.close(inherited)
                requests.close()
                return become(message, descriptors)
            stdout, stderr, status = descriptors
            os.close(stdout)
            os.close(stderr)
            os.write(status, b"%d\n" % pid)
            ends[os.pidfd_open(pid)] = (pid, status)


def become(message, descriptors):
    """Take the streams, session, variables and command line of a program."""
    os.setsid()
    for number, descriptor in enumerate(descriptors[:2], 1):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    arguments, environment = json.loads(message)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    return arguments[0]


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    path = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.modules["__main__"] = types.ModuleType("__main__")  # and not this file
    sys.modules["__main__"].__file__ = path
    exec(compile(Path(path).read_bytes(), path, "exec"), sys.modules["__main__"].__dict__)
