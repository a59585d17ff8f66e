"""Host pages of a GPU are pinned while somebody holds them, and no longer."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from shared.engine.checkpoint import kv_cache
from shared.primitives.errors import StartError

SHAPE = (3, 2, 2, 4, 64)


@dataclass
class Runtime:
    """CUDA's, as far as memory of the host is registered with it."""

    error: int = 0
    registered: dict[int, int] = field(default_factory=dict)

    def cudaHostRegister(self, address: int, size_bytes: int, _flags: int) -> int:  # noqa: N802
        self.registered[address] = size_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_what_was_pinned_is_given_back_with_the_last_view_of_it(runtime: Runtime) -> None:
    host = kv_cache._host_zeros(SHAPE, torch.bfloat16, "cuda:0")
    assert runtime.registered == {host.data_ptr(): host.nbytes}
    assert not host.any()
    page = host[1]
    del host
    assert runtime.registered, "a page is still held"
    del page
    assert not runtime.registered


def test_a_cpu_and_no_pages_pin_nothing(runtime: Runtime) -> None:
    assert kv_cache._host_zeros(SHAPE, torch.bfloat16, "cpu").shape == SHAPE
    assert kv_cache._host_zeros((0, *SHAPE[1:]), torch.bfloat16, "cuda:0").shape == (0, *SHAPE[1:])
    assert not runtime.registered


def test_memory_that_cannot_be_pinned_is_said_with_its_size(runtime: Runtime) -> None:
    runtime.error = 2
    with pytest.raises(StartError, match=r"0\.00 GiB of host pages cannot be pinned \(CUDA error 2\)"):
        kv_cache._host_zeros(SHAPE, torch.bfloat16, "cuda:0")
