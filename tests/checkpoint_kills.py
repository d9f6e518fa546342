"""A job that kills itself, all ranks at once, at a drawn moment of a save."""

import os
import random
import shutil
import threading
import time
from contextlib import suppress

import torch

CALLS = (
    (os, "mkdir"),
    (os, "listdir"),
    (os, "fsync"),
    (os, "replace"),
    (os, "rename"),
    (os, "unlink"),
    (shutil, "rmtree"),
    (torch, "save"),
    (torch, "load"),
)


def end(pids):
    """Kill these processes, this one last."""
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, 9)


def arrange(checkpoints, pids, *, rank, after_calls, delay_s, seed):
    """Kill `pids` within a save: on `rank`, `delay_s` after so many calls into the file system."""
    this_rank = pids.index(os.getpid())
    draw = random.Random(f"{seed} {this_rank}")  # the generators of the job are part of its state
    thread, inside, count = threading.get_ident(), False, 0
    save = checkpoints.save

    def before_call():
        nonlocal count
        if not inside or threading.get_ident() != thread:
            return
        count += 1
        time.sleep(draw.random() * draw.choice([0, 0.001, 0.01]))
        if this_rank == rank and count == after_calls:
            threading.Timer(delay_s, end, (pids,)).start() if delay_s else end(pids)

    def watched(call):
        def run(*arguments, **options):
            before_call()
            return call(*arguments, **options)

        return run

    def watched_save(step):
        nonlocal inside
        inside = True
        try:
            return save(step)
        finally:
            inside = False

    for module, name in CALLS:
        setattr(module, name, watched(getattr(module, name)))
    checkpoints.save = watched_save
