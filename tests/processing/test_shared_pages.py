"""Large buffers come from workers as pages of memory, which nothing else holds."""

import ctypes
import errno
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from odb_nodes import ParallelProcessor, SampleError, ShardedSampler, WorkerOptions
from odb_nodes.processing import shared_pages, transport
from odb_nodes.processing.shared_pages import SHARED_BYTES, PageFile
from odb_nodes.processing.transport import pack, receive, send, unpack

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs memfd_create")

LARGE = SHARED_BYTES // 4  # elements of int32


def image(index):
    """A sample with one large array, one large tensor, and a small one."""
    return {
        "image": np.full(LARGE + index, index, np.int32),
        "mask": torch.full((SHARED_BYTES,), index, dtype=torch.uint8),
        "ids": np.arange(index + 1),
    }


def samples(count=6, process=image, **options):
    source = ShardedSampler(count, shuffle=False, rank=0, world_size=1)
    given = {"num_workers": 2, "chunk_size": 2, "start_method": "fork"}
    node = ParallelProcessor(source, process, workers=WorkerOptions(**given | options))
    try:
        return list(node)
    finally:
        node.close()


def mapped():
    """The mappings of such files in this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:odb_nodes")


def check(found):
    for index, sample in enumerate(found):
        expected = image(index)
        assert {*sample} == {*expected}
        assert (sample["image"] == expected["image"]).all()
        assert sample["mask"].equal(expected["mask"])
        assert (sample["ids"] == expected["ids"]).all()
        sample["image"][0] = sample["mask"][0] = 77  # writable, as all that arrives


def test_what_there_is_no_memory_for_is_said_in_bytes(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    size_bytes = 1 << 62
    file = PageFile(os.memfd_create("odb_nodes"), size_bytes)
    monkeypatch.setattr(shared_pages, "_Mapping", refuse)
    with pytest.raises(MemoryError, match=rf"no {size_bytes} bytes .* Lower `in_flight_bytes`"):
        file.pages()


@pytest.mark.slow
def test_large_buffers_are_mapped_and_gone_with_their_samples():
    before = mapped()
    files = len(os.listdir("/proc/self/fd"))
    found = samples()
    assert mapped() == before + 2 * len(found)
    check(found)
    kept = found[3]["image"]
    del found
    assert mapped() == before + 1
    assert (kept[1:] == 3).all()
    del kept
    assert mapped() == before
    assert len(os.listdir("/proc/self/fd")) <= files


def test_what_one_process_writes_no_other_sees():
    found = samples(2)
    child = os.fork()
    if not child:
        found[1]["image"][:] = 9
        os._exit(int((found[1]["image"] != 9).any()))
    assert os.waitpid(child, 0)[1] == 0
    assert (found[1]["image"] == 1).all()


def forbidden(*_):
    raise OSError("no descriptors left")


def test_they_go_through_the_socket_where_there_can_be_no_file(monkeypatch):
    monkeypatch.setattr(os, "memfd_create", forbidden)
    before = mapped()
    found = samples()
    assert mapped() == before
    check(found)


def test_they_are_read_where_they_cannot_be_mapped(monkeypatch):
    monkeypatch.setattr(shared_pages, "_Mapping", forbidden)
    check(samples())


def test_a_full_memory_sends_the_old_way(monkeypatch):
    write = os.pwritev

    def some(file, parts, at):
        if at > SHARED_BYTES // 2:
            raise OSError("no space left")
        return write(file, [part[: len(part) // 2] for part in parts], at)

    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pwritev", some)
    assert PageFile.of([memoryview(bytes(SHARED_BYTES))]) is None
    assert len(os.listdir("/proc/self/fd")) == files


def test_small_and_large_parts_of_a_message_keep_their_order():
    near, far = socket.socketpair()
    items = [
        {"a": np.arange(5), "b": np.full(LARGE, 1)},
        {"a": np.arange(2), "c": [np.ones(LARGE)]},
    ]
    with closing(near), closing(far):
        sender = threading.Thread(target=send, args=(near, pack(items)))
        sender.start()
        parts = [transport.mapped(part) for part in receive(far)]
        sender.join()
        found = unpack(parts)
        assert (found[0]["b"] == 1).all() and (found[1]["c"][0] == 1).all()
        assert found[1]["a"].tolist() == [0, 1]
        near.close()
        with pytest.raises(EOFError):
            PageFile.receive(far, 1)


def failing(index):
    if index == 3:
        raise ValueError("torn")
    return image(index)


def test_an_error_comes_after_the_good_ones_and_leaves_nothing():
    before = mapped()
    with pytest.raises(SampleError, match="torn"):
        samples(process=failing)
    assert mapped() == before


def send_many(connection, count):
    """Send more files than may be on their way, as a process without privileges."""
    import resource  # which not every system has

    os.closerange(3, connection.fileno())  # of the test process, which may have many open
    os.closerange(connection.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    version_3, no_capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(version_3, no_capabilities) == 0
    pages = PageFile(os.memfd_create("odb_nodes"), 0)
    assert pages.write([bytes(8)])
    for _ in range(count):
        send(connection, [pages])


def test_a_sender_waits_while_too_many_files_are_on_their_way():
    near, far = socket.socketpair()
    child = os.fork()
    if not child:
        with suppress(BaseException):
            send_many(near, 100)
            os._exit(0)
        os._exit(1)
    near.close()
    with closing(far):
        time.sleep(0.5)  # The sender has more on their way by now than it may.
        for _ in range(100):
            receive(far)
    assert os.waitpid(child, 0)[1] == 0


FORK = """
import os

leases, back = [], []
os.register_at_fork(before=lambda: leases.append(Lease(7, back.append)))  # called the last
from odb_nodes.processing.shared_pages import Lease

if os.fork():
    leases.clear()
    assert back == [~7], back
else:
    os._exit(0)
Lease(7, back.append)
assert back == [~7, 7], back
"""


@pytest.mark.slow
def test_a_file_that_comes_while_a_process_is_forked_is_not_written_again():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)
