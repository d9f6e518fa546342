import copy
import mmap
import socket
import threading
import warnings
from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sampling import fewer

from odb_nodes import Sample
from odb_nodes.processing.transport import mapped, pack, receive, send, unpack
from odb_nodes.sample import ItemKey

TENSOR_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
STRUCTURED = np.dtype([("id", "<i2"), ("score", ">f8")])


def moved(items):
    """The items after a journey; they must neither need a warning nor leave one behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return unpack([bytearray(part) for part in pack(items)])


def size_bytes(items):
    """What the items weigh on their journey."""
    return sum(part.nbytes for part in pack(items))


def bits(tensor):
    """The bytes of a tensor, so that NaN equals NaN and -0.0 differs from 0.0."""
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype)
    plain.copy_(tensor.detach().reshape(-1))
    return plain.view(torch.uint8).tolist() if plain.numel() else []


def assert_same(got, sent, where="items"):
    """Same types all the way down, same dtypes, shapes and bytes."""
    assert type(got) is type(sent), where
    if isinstance(sent, np.ndarray):
        # Not the byte order: numpy's own unpickling makes it native.
        native = sent.astype(sent.dtype.newbyteorder("="))
        assert (got.dtype.newbyteorder("="), got.shape) == (native.dtype, sent.shape), where
        if sent.dtype.hasobject:
            assert_same(got.ravel().tolist(), sent.ravel().tolist(), where)
        else:
            assert got.astype(native.dtype).tobytes() == native.tobytes(), where
    elif isinstance(sent, torch.Tensor):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape), where
        assert got.requires_grad == sent.requires_grad, where
        assert bits(got) == bits(sent), where
    elif isinstance(sent, dict):
        assert list(map(repr, got)) == list(map(repr, sent)), f"{where}: keys, in order"
        for key in sent:
            assert_same(got[key], sent[key], f"{where}[{key!r}]")
    elif isinstance(sent, (list, tuple)):
        assert len(got) == len(sent), where
        for index, pair in enumerate(zip(got, sent, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert repr(got) == repr(sent), where


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


# --- hypothesis ---------------------------------------------------------------------------------


def as_strided_view(array, how):
    """The same kind of array as somebody's slice, transpose or read-only view."""
    if array.ndim and how == "step":
        return array[::2]
    if array.ndim and how == "reversed":
        return array[::-1]
    if how == "transposed":
        return array.T
    if how == "fortran":
        return np.asfortranarray(array)
    if how == "frozen":
        array.setflags(write=False)
    return array


dtypes = st.one_of(hnp.scalar_dtypes(), st.just(STRUCTURED))
plain_arrays = dtypes.flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    )
)
object_arrays = st.lists(st.one_of(st.none(), st.text(max_size=3), st.integers()), max_size=3).map(
    lambda values: np.array([*values, None], dtype=object)[:-1]
)
views = st.sampled_from(["as it is", "step", "reversed", "transposed", "fortran", "frozen"])
arrays = st.one_of(
    st.builds(as_strided_view, plain_arrays, views),
    object_arrays,
    hnp.arrays(np.int64, (1, 5)),
)


@st.composite
def tensors(draw, max_dims=3):
    dtype = draw(st.sampled_from(TENSOR_DTYPES))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=max_dims, min_side=0, max_side=4))
    count = int(np.prod(shape)) * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        data = bytes(value & 1 for value in data)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if count else torch.empty(0)
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    how = draw(views)
    if tensor.ndim and how == "step":
        tensor = tensor[::2]
    elif tensor.ndim == 2 and how == "transposed":
        tensor = tensor.T
    elif dtype.is_floating_point and dtype.itemsize > 1 and how == "frozen":
        tensor = tensor.clone().requires_grad_()
    return tensor


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.sampled_from([np.float32(1.5), np.int16(-3), np.bool_(True)]),
)
values = st.recursive(
    st.one_of(arrays, tensors(), scalars),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=5,
)
one_dimensional = [
    st.lists(st.integers(), max_size=4),
    tensors(max_dims=1),
    st.text(max_size=3),
    st.just(None),
    *(
        hnp.arrays(dtype, st.integers(0, 5)).map(lambda array: array[::-1])
        for dtype in ("<i8", ">i4", "f4", "U3", "M8[s]", "?", STRUCTURED)
    ),
]


@st.composite
def samples_of_one_shape(draw):
    """What most datasets yield: dicts with the same keys, each key with values of one kind."""
    keys = draw(st.lists(st.text(max_size=3), max_size=4, unique=True))
    kinds = [draw(st.sampled_from(one_dimensional)) for _ in keys]
    count = draw(st.integers(0, 6))
    row = st.tuples(*kinds).map(lambda drawn: dict(zip(keys, drawn, strict=True)))
    return draw(st.lists(row, min_size=count, max_size=count))


def as_samples(items):
    return [Sample(item, index + 1, index, 7 * index) for index, item in enumerate(items)]


chunks = st.one_of(
    samples_of_one_shape(),
    samples_of_one_shape().map(as_samples),
    st.lists(values, max_size=4),
    st.lists(values, max_size=3).map(as_samples),
    st.lists(st.dictionaries(st.sampled_from("abc"), values, max_size=3), max_size=4),
    st.tuples(st.lists(values, max_size=2), st.lists(values, max_size=2).map(as_samples)).map(
        lambda parts: parts[0] + parts[1]
    ),
)


@settings(fewer(2), suppress_health_check=list(HealthCheck))
@given(items=chunks)
def test_anything_arrives_as_it_left_in_memory_of_its_own(items):
    before = copy.deepcopy(items) if not any_requires_grad(items) else items
    arrived = moved(items)
    assert_same(items, before, "the original")  # nothing happens to it
    assert_same(arrived, items)
    assert_owned(arrived)


def any_requires_grad(items):
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves(items))


# --- one by one ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "items", [[], [{}], [{}, {}], [[]], [()], [None], [{}, {"a": 1}], [Sample({}, 1, 0)]]
)
def test_nothing_is_lost_where_there_is_little_to_carry(items):
    assert_same(moved(items), items)


@pytest.mark.parametrize("known", [0, 1, 2])
def test_every_field_of_samples_arrives(known):
    samples = [
        Sample({}, 3, 2, 1, "a", "labels", key, ItemKey("a", key, 2, 1), 9 + key, "task")
        for key in range(2)
    ]
    assert None not in samples[1] and len(samples[1]) == len(Sample._fields)
    samples[known:] = [sample._replace(item=None, digest=None) for sample in samples[known:]]
    assert moved(samples) == samples


@pytest.mark.parametrize("dtype", TENSOR_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (1, 5), (2, 0), (3, 4)], ids=str)
def test_tensors_of_every_dtype_and_shape(dtype, shape):
    def tensor():
        return torch.randint(0, 2, shape).to(dtype)

    for items in ([{"x": tensor()}, {"x": tensor()}], [tensor()], [[tensor(), "text"]]):
        arrived = moved(items)
        assert_same(arrived, items)
        for leaf in leaves(arrived):
            leaf.copy_(torch.ones(shape).to(dtype))


@pytest.mark.parametrize(
    "dtype", ["?", "i1", ">i4", "u8", "f2", "<f4", ">f8", "c8", "U3", "S3", "V4", "M8[ms]", "m8[D]"]
)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (1, 5), (2, 0), (3, 4)], ids=str)
def test_arrays_of_every_dtype_and_shape(dtype, shape):
    def array():
        return np.zeros(shape, dtype)

    for items in ([{"x": array()}, {"x": array()}], [array()], [(array(), None)]):
        arrived = moved(items)
        assert_same(arrived, items)
        for leaf in leaves(arrived):
            leaf[...] = np.ones((), leaf.dtype) if leaf.dtype.kind in "?iufc" else leaf


def test_lengths_may_differ_within_a_column_and_keys_between_samples():
    items = [{"input_ids": np.arange(n), "labels": torch.arange(n) - 100} for n in (3, 0, 7, 1)]
    assert_same(moved(items), items)
    items = [*items, {"input_ids": np.arange(3)}, {"labels": [1], "input_ids": [2]}]
    assert_same(moved(items), items)


def test_a_column_of_mixed_kinds_keeps_each():
    kinds = [np.arange(3), torch.arange(3), [0, 1, 2], np.arange(3, dtype="i4"), np.ones((1, 3))]
    items = [{"input_ids": kind} for kind in kinds]
    for shift in range(len(items)):
        rotated = items[shift:] + items[:shift]
        assert_same(moved(rotated), rotated)


def test_subclasses_of_dict_array_and_tensor_stay_what_they_are():
    class_kept = [
        OrderedDict(a=np.arange(2)),
        np.ma.masked_array([1, 2], [True, False]),
        np.rec.array([(1, 2.0)]),
        torch.nn.Parameter(torch.ones(2)),
    ]
    for value in class_kept:
        for items in ([value, value], [{"a": value}]):
            assert [type(leaf) for leaf in moved(items)] == [type(leaf) for leaf in items]
            assert str(moved(items)) == str(items)


def test_tensors_that_numpy_cannot_hold():
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    for tensor in (numbers.conj(), numbers.conj().imag, numbers.reshape(1, 2).conj()):
        assert_same(moved([{"x": tensor}, {"x": tensor}]), [{"x": tensor}] * 2)
        assert_same(moved([[tensor]]), [[tensor]])
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(moved([sparse])[0].to_dense(), torch.eye(3))
    leaf, inner = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 2
    assert_same(moved([{"x": leaf}, {"x": inner}]), [{"x": leaf}, {"x": inner}])


def test_views_of_one_array_arrive_apart():
    base = np.zeros((4, 3))
    items = [{"row": base[index], "all": base} for index in range(4)]
    arrived = moved(items)
    assert_same(arrived, items)
    assert_owned([item["row"] for item in arrived])
    tensor = torch.zeros(4, 3)
    assert_owned(moved([[tensor[0], tensor[1]], [tensor[:2]]]))


def test_a_read_only_array_arrives_writable():
    # As `np.asarray(image)` of a Pillow image gives it; torch warns of tensors made from these.
    image = np.zeros((2, 2, 3), np.uint8)
    image.setflags(write=False)
    assert moved([{"pixels": image}])[0]["pixels"].flags.writeable
    assert not image.flags.writeable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_slice_travels_without_the_rest(dtype):
    whole = torch.zeros(1000, 1000, dtype=dtype)
    assert size_bytes([whole[0], {"row": whole[1]}]) < 20_000
    assert size_bytes([{"row": whole[0]}, {"row": whole[1]}]) < 20_000


def test_a_large_array_does_not_keep_the_chunk_alive():
    images = [{"pixels": np.zeros((100, 100)), "ids": np.arange(9)} for _ in range(8)]
    base = moved(images)[0]["pixels"]
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert base.nbytes <= 100 * 100 * 8
    assert base.base is None or memoryview(base.base).nbytes <= 100 * 100 * 8


def test_ordinary_samples_cost_little_more_than_their_bytes():
    items = [
        Sample({"input_ids": np.arange(100), "labels": torch.arange(100)}, 100, 99)
        for _ in range(64)
    ]
    assert size_bytes(items) < 1.1 * 64 * 2 * 100 * 8


def test_what_cannot_be_pickled_raises():
    for value in (lambda: None, (index for index in range(3))):
        with pytest.raises(Exception, match="pickle"):
            pack([{"a": value}])


# --- over a socket --------------------------------------------------------------------------------


def test_a_message_arrives_part_by_part_in_memory_of_its_own():
    near, far = socket.socketpair()
    messages = [[], [b""], [b"head", memoryview(bytes(5_000_000)), b"", b"tail"], [b"next"]]
    with near, far:
        sender = threading.Thread(target=lambda: [send(near, parts) for parts in messages])
        sender.start()
        for parts in messages:
            got = [mapped(part) for part in receive(far)]
            assert [bytes(memoryview(part)) for part in got] == list(map(bytes, parts))
            assert all(isinstance(part, (bytearray, memoryview, mmap.mmap)) for part in got)
        sender.join()


@pytest.mark.parametrize("sent", [0, 5, 12, 20, 1000])
def test_a_message_that_breaks_off_is_the_end(sent):
    near, far = socket.socketpair()
    with far:
        with near:
            send(near, [bytes(2000)])
        whole = b"".join(iter(lambda: far.recv(4096), b""))
    near, far = socket.socketpair()
    with far:
        with near:
            near.sendall(whole[:sent])
        with pytest.raises(EOFError):
            receive(far)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (40, 50), (0,), (1,)])
def test_numbers_that_numpy_lacks_travel_as_buffers_of_their_own(dtype, shape):
    values = torch.randn(shape).to(dtype)
    views = [values, values.t()] if values.ndim == 2 else [values, values.repeat(3)[::3]]
    body, *buffers = pack([{"values": one} for one in views])
    assert [len(buffer) for buffer in buffers] == [one.nbytes for one in views]
    assert len(body) < 1000
    for one, item in zip(
        views, unpack([bytearray(part) for part in (body, *buffers)]), strict=True
    ):
        found = item["values"]
        assert (found.dtype, found.shape) == (one.dtype, one.shape)
        assert found.float().equal(one.float())
        found.fill_(1)  # writable
