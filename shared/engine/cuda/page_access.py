"""How a transfer reads and writes KV pages that lie in a tensor, in VRAM above all. Implements `PageAccess`.

Copies go over a stream of their own and have ended when a call returns, so steps in flight neither wait for them nor
are waited for. Whoever calls owns the pages: they belong to a lease, to a fetch, or are the known page.

    NIC ── writes over PCIe ──► VRAM      DONE is seen by the CPU; `settle` lets kernels see the bytes
    peer's VRAM ── cuda_ipc copy ──► VRAM  runs on a stream of UCX's; `fence` waits for it

A tensor of the CPU works the same way, without streams: tests and rehearsals take this path there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import structlog
import torch
from torch import Tensor

from shared.primitives.errors import TransferError

log = structlog.get_logger(__name__)


class TorchPageAccess:
    """To the bytes of one contiguous tensor, by their addresses. `settle` and `fence` belong to the worker's loop."""

    def __init__(self, store: Tensor):
        assert store.is_contiguous()
        self._bytes = store.flatten().view(torch.uint8)
        self._address = store.data_ptr()
        self._device = store.device
        self._on_gpu = store.device.type == "cuda"
        self._stream = _new_stream(store.device) if self._on_gpu else None
        self._driver = _driver_that_flushes(store.device) if self._on_gpu else None

    def view(self, _address: int, _size_bytes: int) -> memoryview | None:
        """See `PageAccess`. Never: only copies show another memory."""
        return None

    def buffer(self, size_bytes: int) -> memoryview:
        """See `PageAccess`. Pinned for a GPU, which then copies without the driver's own buffer."""
        memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._on_gpu)
        return memory.numpy().data

    def read(self, address: int, into: memoryview) -> None:
        """See `PageAccess`."""
        self._copy(torch.frombuffer(into, dtype=torch.uint8), self._span(address, len(into)))

    def write(self, address: int, content: bytes | memoryview) -> None:
        """See `PageAccess`."""
        source = memoryview(content)
        writable = bytearray(source) if source.readonly else source  # torch has no tensors that are read-only
        self._copy(self._span(address, len(source)), torch.frombuffer(writable, dtype=torch.uint8))

    def enter(self) -> None:
        """See `PageAccess`. Threads begin with the first GPU that the process sees, and a rank may have another."""
        if self._on_gpu:
            torch.cuda.set_device(self._device)

    def settle(self) -> None:
        """See `PageAccess`. `TransferError` when the driver cannot."""
        if self._driver is None:
            return
        with torch.cuda.device(self._device):
            (result,) = self._driver.cuFlushGPUDirectRDMAWrites(
                self._driver.CUflushGPUDirectRDMAWritesTarget.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                self._driver.CUflushGPUDirectRDMAWritesScope.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
            )
        if result != self._driver.CUresult.CUDA_SUCCESS:
            raise TransferError(f"writes of RDMA into VRAM cannot be flushed: {result!r}")

    def fence(self) -> None:
        """See `PageAccess`. Waits for all that the GPU was given, steps included."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def _span(self, address: int, size_bytes: int) -> Tensor:
        begin = address - self._address
        assert 0 <= begin <= len(self._bytes) - size_bytes, (
            f"{size_bytes} bytes at {begin} of {len(self._bytes)}"
        )
        return self._bytes[begin : begin + size_bytes]

    def _copy(self, target: Tensor, source: Tensor) -> None:
        with self._own_stream():
            target.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def _own_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _driver_that_flushes(device: torch.device) -> Any:
    """CUDA's driver where writes of RDMA must be flushed by hand; None where it orders them, or cannot flush."""
    driver = import_module("cuda.bindings.driver")
    ordering = _attribute(driver, device, "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING")
    options = _attribute(driver, device, "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS")
    if ordering >= int(driver.CUGPUDirectRDMAWritesOrdering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER):
        return None
    if options & int(driver.CUflushGPUDirectRDMAWritesOptions.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST):
        return driver
    log.warning("transfer.rdma_writes_unordered", device=str(device), advice="leave kv_devices empty")
    return None


def _attribute(driver: Any, device: torch.device, name: str) -> int:
    result, value = driver.cuDeviceGetAttribute(getattr(driver.CUdevice_attribute, name), device.index or 0)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise TransferError(f"{name} of {device} cannot be read: {result!r}")
    return int(value)
