"""Pages in a tensor, as a transfer reaches them; and CUDA's driver, which flushes RDMA's writes where it must."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared.engine.checkpoint.kv_cache import KVCache, KVLayout, PageCounts
from shared.engine.cuda import page_access
from shared.engine.parallel.shares import HeldHeads
from shared.transfer.memory import WHOLE_PAGES, PageSlices
from shared.worker.page_memory import page_memory
from tests.tensor_pages import TensorPages
from tests.unit.engine.test_paged_batch import CONFIG


@pytest.fixture(params=[torch.float8_e4m3fn, torch.bfloat16], ids=str)
def pages(request: pytest.FixtureRequest) -> TensorPages:
    return TensorPages("cpu", pages=4, page_bytes=1000, dtype=request.param)


def test_bytes_are_copied_both_ways_and_no_others_change(pages: TensorPages) -> None:
    access, address = pages.memory.access, pages.memory.address
    access.write(address + 995, b"0123456789")
    into = access.buffer(12)
    access.read(address + 994, into)
    assert bytes(into) == b"\0" + b"0123456789" + b"\0"
    assert int(pages.bytes.count_nonzero()) == 10


def test_bytes_come_into_any_memory_and_out_of_it(pages: TensorPages) -> None:
    address, plain = pages.memory.address, bytearray(b"abcdef")
    pages.memory.access.write(address, memoryview(plain)[1:4])
    pages.memory.access.read(address, memoryview(plain)[3:])
    assert plain == b"abcbcd"


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (4999, 2), (5000, 1)])
def test_bytes_outside_of_the_tensor_are_never_touched(pages: TensorPages, offset: int, size: int) -> None:
    with pytest.raises(AssertionError, match=r"bytes at .* of 5000"):
        pages.memory.access.write(pages.memory.address + offset, bytes(size))


def test_a_known_page_is_written_recognized_and_cleared_through_torch(pages: TensorPages) -> None:
    memory = pages.memory
    assert not memory.holds_known_bytes(4)
    memory.write_known_bytes(4)
    assert memory.holds_known_bytes(4)
    pages.bytes[4, -1] += 1
    assert not memory.holds_known_bytes(4)
    memory.clear(4)
    assert pages.holds(4, 0)


def test_the_bytes_themselves_are_out_of_reach(pages: TensorPages) -> None:
    assert pages.memory.access.view(pages.memory.address, 8) is None


@pytest.mark.parametrize("layout", KVLayout)
def test_a_cache_is_offered_without_its_padding_and_by_torch_for_the_cuda_engine(layout: KVLayout) -> None:
    cache = KVCache(CONFIG, PageCounts(3, known=1, padding=1), page_size=4, layout=layout)
    memory = page_memory(cache)
    assert (memory.memory, memory.device_id, memory.known_page) == ("DRAM", 0, 3)
    assert memory.size_bytes == 4 * cache.page_bytes == cache.store[:4].nbytes
    memory.access.write(memory.address_of(1), b"\x01" * cache.page_bytes)
    changed = cache.store.view(torch.uint8).flatten(1).count_nonzero(1)
    assert changed.tolist() == [0, cache.page_bytes, 0, 0, 0]
    direct = memory.access.view(memory.address, 8) is not None
    assert direct is (layout is KVLayout.KEYS_BY_DIMENSION)


def test_a_page_whose_heads_lie_apart_is_offered_in_slices() -> None:
    cache = KVCache(CONFIG, PageCounts(3), page_size=4, layout=KVLayout.HEADS_APART)
    assert page_memory(cache).slices == PageSlices(0, CONFIG.kv_heads, CONFIG.kv_heads)
    assert page_memory(cache, HeldHeads(2, CONFIG.kv_heads, 8)).slices == PageSlices(2, CONFIG.kv_heads, 8)
    whole = KVCache(CONFIG, PageCounts(3), page_size=4, layout=KVLayout.KEYS_BY_TOKEN)
    assert page_memory(whole).slices == WHOLE_PAGES


# ---- CUDA's driver ---------------------------------------------------------------------------------------------


def driver(ordering: int, options: int) -> Any:
    """What is asked of `cuda.bindings.driver`, with its values."""
    attributes = {"order": ordering, "options": options}
    return SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        CUdevice_attribute=SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING="order",
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS="options",
        ),
        CUGPUDirectRDMAWritesOrdering=SimpleNamespace(CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER=100),
        CUflushGPUDirectRDMAWritesOptions=SimpleNamespace(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST=1),
        cuDeviceGetAttribute=lambda name, _device: (0, attributes[name]),
    )


@pytest.mark.parametrize(
    ("ordering", "options", "flushes"),
    [(0, 1, True), (0, 3, True), (100, 1, False), (200, 3, False), (0, 2, False)],
)
def test_writes_are_flushed_by_hand_where_the_gpu_does_not_order_them(
    ordering: int, options: int, flushes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = driver(ordering, options)
    monkeypatch.setattr(page_access, "import_module", lambda _name: given)
    found = page_access._driver_that_flushes(torch.device("cuda", 0))
    assert (found is given) is flushes
