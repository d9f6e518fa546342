"""Any item comes back from a worker equal, bit by bit, in memory of its own; and what limits it."""

import copy
import ctypes
import errno
import mmap
import os
import pickle
import socket
import sys
import threading
import warnings
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rows import KEYS
from sampling import fewer
from worker_functions import processor, same

from odb_nodes import IterableSource, Sample
from odb_nodes.core.processing.chunk import ChunkTask, runs_of
from odb_nodes.core.processing.transport import (
    SHARED_BYTES,
    PageFile,
    dumps,
    pack,
    receive,
    send,
    unpack,
)
from odb_nodes.core.sample import ItemKey
from odb_nodes.core.sample_block import ItemKeys

TENSOR_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
ARRAY_DTYPES = ["?", "i1", ">i4", "u8", "f2", ">f8", "c8", "U3", "S3", "V4", "M8[ms]", "m8[D]"]
STRUCTURED = np.dtype([("id", "<i2"), ("score", ">f8")])
ONE_BY_ONE = [np.zeros((2, 0), dtype) for dtype in ARRAY_DTYPES]
ONE_BY_ONE += [torch.ones(3, 4).to(dtype).T for dtype in TENSOR_DTYPES]


def moved(items):
    """The items after a journey; they must neither need a warning nor leave one behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return unpack([bytearray(part) for part in pack(items)])


def bits(tensor):
    """The bytes of a tensor, so that NaN equals NaN and -0.0 differs from 0.0."""
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype)
    plain.copy_(tensor.detach().reshape(-1))
    return plain.view(torch.uint8).tolist() if plain.numel() else []


def assert_same(arrived, sent, where="items"):
    """Same types all the way down, same dtypes, shapes and bytes."""
    assert type(arrived) is type(sent), where
    if isinstance(sent, np.ndarray):
        # Not the byte order: numpy's own unpickling makes it native.
        native = sent.astype(sent.dtype.newbyteorder("="))
        assert (arrived.dtype.newbyteorder("="), arrived.shape) == (native.dtype, sent.shape), where
        if sent.dtype.hasobject:
            assert_same(arrived.ravel().tolist(), sent.ravel().tolist(), where)
        else:
            assert arrived.astype(native.dtype).tobytes() == native.tobytes(), where
    elif isinstance(sent, torch.Tensor):
        assert (arrived.dtype, arrived.shape) == (sent.dtype, sent.shape), where
        assert arrived.requires_grad == sent.requires_grad, where
        assert bits(arrived) == bits(sent), where
    elif isinstance(sent, dict):
        assert list(map(repr, arrived)) == list(map(repr, sent)), f"{where}: keys, in order"
        for key in sent:
            assert_same(arrived[key], sent[key], f"{where}[{key!r}]")
    elif isinstance(sent, (list, tuple)):
        assert len(arrived) == len(sent), where
        for index, pair in enumerate(zip(arrived, sent, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert repr(arrived) == repr(sent), where


def leaves(value):
    """The arrays and tensors of a nested value."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        yield value
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)


def extent(leaf):
    """First and last address of a leaf's memory."""
    if isinstance(leaf, np.ndarray):
        return leaf.ctypes.data, leaf.ctypes.data + leaf.nbytes
    strides = zip(leaf.stride(), leaf.shape, strict=True)
    last = sum(step * (count - 1) for step, count in strides) + 1
    return leaf.data_ptr(), leaf.data_ptr() + last * leaf.element_size()


def assert_owned(items):
    """Every leaf can be written, and writing it changes no other leaf."""
    present = [leaf for leaf in leaves(items) if leaf.nbytes]
    for leaf in present:
        assert not isinstance(leaf, np.ndarray) or leaf.flags.writeable
    extents = sorted([extent(leaf) for leaf in present])
    for (_, stop), (start, _) in pairwise(extents):
        assert stop <= start, "two leaves share memory"


# --- any item -------------------------------------------------------------------------------------


def frozen(array):
    array.setflags(write=False)
    return array


def row_of(kind, size):
    """A value of one dimension."""
    if callable(kind):
        return kind(size)
    if isinstance(kind, torch.dtype):
        return torch.arange(size).to(kind)
    return np.zeros(size, kind) if kind == "V4" else np.arange(size).astype(kind)


def some(*arrays):
    """Ways to give an array: as somebody's slice, transpose or read-only view."""
    return [lambda row: row, lambda row: row[::2], lambda row: row[None], *arrays]


KINDS = [
    *(*ARRAY_DTYPES, STRUCTURED, *TENSOR_DTYPES),
    *(lambda size: [*range(size)], lambda size: "abcdef"[:size], lambda _: None),
    lambda size: np.array([*"ab", None, 2, 1.5][:size], object),
    lambda size: np.array([np.nan, -0.0, np.inf, 0.0, 1.5][:size]),
    lambda size: torch.tensor([np.nan, -0.0, np.inf, 0.0, 1.5][:size], requires_grad=True),
]
OF_ARRAYS = some(
    lambda row: row[::-1],
    lambda row: np.stack([row, row]).T,
    lambda row: np.asfortranarray(np.stack([row, row])),
    frozen,
    lambda row: row[:1].reshape(()) if len(row) else row,
)
OF_TENSORS = some(lambda row: row[None].T, lambda row: row[0] if len(row) else row)
SCALARS = [None, True, 3, 2**70, float("nan"), "text", b"bytes"]
SCALARS += [np.float32(1.5), np.int16(-3), np.bool_(True)]


@st.composite
def arrays_and_tensors(draw):
    value = row_of(draw(st.sampled_from(KINDS)), draw(st.integers(0, 5)))
    if isinstance(value, np.ndarray):
        return draw(st.sampled_from(OF_ARRAYS))(value)
    return draw(st.sampled_from(OF_TENSORS))(value) if isinstance(value, torch.Tensor) else value


values = st.recursive(
    arrays_and_tensors() | st.sampled_from(SCALARS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def samples_of_one_shape(draw):
    """What most datasets yield: dicts with the same keys, each key with values of one kind."""
    kinds = draw(st.dictionaries(st.text(max_size=3), st.sampled_from(KINDS), max_size=4))
    sizes = draw(st.lists(st.integers(0, 5), max_size=6))
    return [{key: row_of(kind, size) for key, kind in kinds.items()} for size in sizes]


def as_samples(items):
    return [Sample(item, index + 1, index, 7 * index) for index, item in enumerate(items)]


chunks = samples_of_one_shape() | st.lists(values, max_size=4)
chunks |= chunks.map(as_samples)
chunks |= st.tuples(chunks, chunks).map(lambda parts: parts[0] + parts[1])


@settings(fewer(2), suppress_health_check=list(HealthCheck))
@given(items=chunks)
@example([{"x": leaf} for leaf in ONE_BY_ONE])
@example([{"x": torch.ones(5, 4).to(torch.float8_e5m2)[:, :2]} for _ in range(2)])
@example(ONE_BY_ONE)
@example([Sample({}, 3, 2, 1, "a", "labels", n, ItemKey("a", n, 2, 1), 9, "task") for n in (0, 1)])
@example([{"x": torch.tensor([1 + 2j, 3 - 1j]).conj()}, {"x": torch.tensor([1 + 2j]).conj().imag}])
@example([{"x": torch.ones(2, requires_grad=True) * 2} for _ in range(2)])
@example([{"row": np.zeros((4, 3))[1], "all": np.zeros((4, 3))}])
@example([{"x": 1, "y": 2}, {"y": 3, "x": 4}])
@example([{"x": np.arange(3)}, {"x": np.arange(3, dtype=np.int32)}])
@example([{"x": torch.ones(2)}, {"x": torch.ones(2, requires_grad=True)}])
@example([{"x": np.array(["a", None], object)} for _ in range(2)])
@example([frozen(np.zeros((2, 3))), 1])
def test_anything_arrives_as_it_left_in_memory_of_its_own(items):
    has_graph = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves(items))
    before = items if has_graph else copy.deepcopy(items)
    arrived = moved(items)
    assert_same(items, before, "the original")  # nothing happens to it
    assert_same(arrived, items)
    assert_owned(arrived)


def test_subclasses_and_sparse_tensors_stay_what_they_are():
    kept = [
        OrderedDict(a=np.arange(2)),
        np.ma.masked_array([1, 2], [True, False]),
        np.rec.array([(1, 2.0)]),
        torch.nn.Parameter(torch.ones(2)),
        torch.eye(3).to_sparse(),
    ]
    for value in kept:
        for items in ([value, value], [{"a": value}]):
            assert [type(leaf) for leaf in moved(items)] == [type(leaf) for leaf in items]
            assert str(moved(items)) == str(items)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_weigh_little_more_than_their_bytes_and_a_slice_travels_without_the_rest(dtype):
    def size_bytes(items):
        return sum(part.nbytes for part in pack(items))

    whole = torch.zeros(1000, 1000, dtype=dtype)
    assert size_bytes([whole[0], {"row": whole[1]}]) < 20_000
    items = [Sample({"ids": np.arange(99), "x": torch.ones(99, 4).to(dtype)}, 99, 9)] * 64
    assert size_bytes(items) < 1.1 * 64 * 99 * (8 + 4 * dtype.itemsize)


def test_a_large_array_does_not_keep_the_chunk_alive():
    base = moved([{"pixels": np.zeros((100, 100)), "ids": np.arange(9)} for _ in range(8)])[0]
    base = base["pixels"]
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert base.nbytes <= 100 * 100 * 8
    assert base.base is None or memoryview(base.base).nbytes <= 100 * 100 * 8


@given(st.lists(KEYS | st.none(), max_size=20))
def test_a_task_arrives_as_it_was_sent_and_samples_know_their_keys(keys):
    task = ChunkTask([*range(len(keys))], ItemKeys.of(keys), 3, 1, range(len(keys)))
    (arrived_task,) = moved([task])
    assert [*arrived_task.keys] == keys and [*map(type, arrived_task.keys)] == [*map(type, keys)]
    assert replace(arrived_task, keys=task.keys) == task
    samples = [Sample({}, 1, 1, item=key) for key in keys]
    arrived = [sample for run in moved(runs_of(samples, joined=True)) for sample in run]
    assert arrived == samples and [type(sample.item) for sample in arrived] == [*map(type, keys)]


# --- between processes ----------------------------------------------------------------------------

LARGE = SHARED_BYTES // 4  # elements of int32: they come as pages of memory


def image(index):
    """A sample with one large array, one large tensor, and a small one."""
    return {
        "image": np.full(LARGE + index, index, np.int32),
        "mask": torch.full((SHARED_BYTES,), index, dtype=torch.uint8),
        "ids": np.arange(index + 1),
    }


def through_a_worker(items, process_fn=same):
    source = IterableSource(items, 0, 1)
    node = processor(process_fn, source=source, seed=None, num_workers=2, chunk_size=2)
    try:
        return list(node)
    finally:
        node.close()


def held():
    """The mappings of such files, and the files, of this process."""
    return Path("/proc/self/maps").read_text().count("memfd:odb_nodes"), len(
        os.listdir("/proc/self/fd")
    )


@pytest.mark.slow
def test_all_arrives_from_a_worker_and_large_buffers_are_gone_with_their_samples():
    mapped, files = held()
    images = through_a_worker(range(6), image)
    assert held()[0] == mapped + 2 * len(images)
    assert_same(images, [image(index) for index in range(6)])
    assert_owned(images)
    child = os.fork()  # What one process writes, no other sees.
    if not child:
        images[1]["image"][:] = 9
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (images[1]["image"] == 1).all()
    kept = images[3]["image"]
    del images
    assert held()[0] == mapped + 1
    assert (kept == 3).all()
    del kept
    assert held() == (mapped, files)
    assert_same(through_a_worker(range(len(ONE_BY_ONE)), ONE_BY_ONE.__getitem__), ONE_BY_ONE)


def refuse(*_):
    raise OSError(errno.ENOMEM, "no memory or descriptors left")


def write_some(file, content, offset, pwrite=os.pwrite):
    if offset > SHARED_BYTES // 2:
        refuse()
    return pwrite(file, content[: len(content) // 2], offset)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "fault"),
    [(os, "memfd_create", refuse), (mmap, "mmap", refuse), (os, "pwrite", write_some)],
)
def test_large_buffers_go_the_old_way_where_there_can_be_no_pages(module, name, fault, monkeypatch):
    before = held()
    monkeypatch.setattr(module, name, fault)
    assert_same(through_a_worker(range(6), image), [image(index) for index in range(6)])
    assert held() == before


def test_what_there_is_no_memory_for_is_said_in_bytes(monkeypatch):
    size_bytes = 1 << 62
    file = PageFile(os.memfd_create("odb_nodes"), size_bytes)
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match=rf"no {size_bytes} bytes .* `in_flight_bytes`"):
        file.pages()


def send_many(connection, count):
    """Send more files than may be on their way, as a process without privileges."""
    import resource  # which not every system has

    os.closerange(3, connection.fileno())  # of the test process, which may have many open
    os.closerange(connection.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    version_3, no_capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(version_3, no_capabilities) == 0
    pages = PageFile.of(bytes(8))
    for _ in range(count):
        send(connection, [pages])


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs memfd_create")
def test_a_sender_waits_while_too_many_files_are_on_their_way():
    near, far = socket.socketpair()
    child = os.fork()
    if not child:
        with suppress(BaseException):
            send_many(near, 100)
            os._exit(0)
        os._exit(1)
    near.close()
    with far:
        threading.Event().wait(0.5)  # The sender has more on their way by now than it may.
        for _ in range(100):
            receive(far)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("dtype", TENSOR_DTYPES, ids=str)
def test_an_item_may_have_any_dtype_on_its_way_to_a_worker(dtype):
    """Not so in pickles of torch itself, which cannot read back what some dtypes become."""
    items = [torch.ones(3, 4).to(dtype).T, {"x": torch.zeros(0).to(dtype)}]
    assert_same(pickle.loads(dumps(items)), items)
