"""Page memory in a torch tensor, on a GPU or on the CPU: what the CUDA engine's pages are to a transfer."""

from __future__ import annotations

import torch

from shared.engine.cuda.page_access import TorchPageAccess
from shared.transfer.memory import PageMemory
from tests.fetcher_contract import PAGE_BYTES, PAGE_SIZES, PAGES, PageBuffer


class TensorPages(PageBuffer):
    """A page buffer on "cuda" or "cpu"; the transfer reaches it through torch alone."""

    def __init__(
        self,
        device: str,
        pages: int = PAGES,
        page_bytes: int = PAGE_BYTES,
        dtype: torch.dtype = torch.float8_e4m3fn,
    ):
        self.store = torch.zeros((pages + 1, page_bytes // dtype.itemsize), dtype=dtype, device=device)
        self.bytes = self.store.view(torch.uint8)
        self.memory = PageMemory(
            self.store.data_ptr(),
            page_bytes,
            pages,
            device_id=self.store.device.index or 0,
            memory="VRAM" if self.store.is_cuda else "DRAM",
            known_pages=1,
            access=TorchPageAccess(self.store),
        )

    def fill(self, page: int, byte: int) -> None:
        self.bytes[page].fill_(byte)
        self._wait()

    def holds(self, page: int, byte: int) -> bool:
        return bool((self.bytes[page] == byte).all())

    def _wait(self) -> None:
        """For the device: other processes do not wait for its streams."""
        if self.store.is_cuda:
            torch.cuda.synchronize(self.store.device)


def tensor_pages(dtype: str) -> TensorPages:
    """Pages on the CPU whose keys and values have this type."""
    return TensorPages("cpu", page_bytes=PAGE_SIZES[dtype], dtype=getattr(torch, dtype))
