"""Products of few rows: the CUDA source, run on this CPU, rounds the right sums once."""

from __future__ import annotations

import pytest
import torch

from shared.engine.cuda.kernels.gemv import ROWS_MAX, SOURCE, Gemv
from tests.unit.engine.cuda.kernels.host_kernels import HostLaunch, compile_for_host

DTYPES = (torch.bfloat16, torch.float16)
# inputs and outputs: fewer than a warp reads at once, whole turns, a last turn that not all lanes have, outputs left
SHAPES = ((8, 1), (256, 16), (1000, 7), (1024, 34), (4360, 5))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> HostLaunch:
    return HostLaunch(compile_for_host(SOURCE, tmp_path_factory.mktemp("gemv")))


@pytest.mark.parametrize("processors", [1, 132], ids=["few", "many"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", range(1, ROWS_MAX + 1))
def test_products_are_the_sums_rounded_once(
    library: HostLaunch, rows: int, shape: tuple[int, int], dtype: torch.dtype, processors: int
) -> None:
    inputs, outputs = shape
    torch.manual_seed(inputs + rows)
    gemv = Gemv(library, processors)
    x = torch.randn(rows, inputs + 8).to(dtype)[:, :inputs]  # rows lie apart
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    assert gemv.rows_max(weight)
    for added in (bias, None):
        wanted = x.double() @ weight.double().t() + (0 if added is None else added.double())
        wide, narrow = (
            torch.full((rows, outputs + 3), torch.nan),
            torch.full((rows, outputs), torch.nan).to(dtype),
        )
        gemv(x, weight, added, wide[:, :outputs])
        # float32 of some thousand products, each of size 1
        torch.testing.assert_close(wide[:, :outputs].double(), wanted, rtol=0, atol=1e-6 * inputs**0.5 * 8)
        assert wide[:, outputs:].isnan().all()
        assert torch.equal(gemv(x, weight, added, narrow), wide[:, :outputs].to(dtype))


def test_what_is_not_a_number_stays_in_its_row(library: HostLaunch) -> None:
    x = torch.zeros(2, 1000, dtype=torch.bfloat16)
    x[1, 999] = torch.inf
    weight = torch.zeros(3, 1000, dtype=torch.bfloat16)
    found = Gemv(library)(x, weight, None, torch.empty(2, 3))
    assert torch.equal(found[0], torch.zeros(3))
    assert found[1].isnan().all()


def test_a_weight_that_lies_otherwise_is_left_to_the_library(library: HostLaunch) -> None:
    gemv = Gemv(library)
    assert not gemv.rows_max(torch.zeros(4, 12, dtype=torch.bfloat16))
    assert not gemv.rows_max(torch.zeros(4, 32, dtype=torch.bfloat16)[:, ::2])
    assert not gemv.rows_max(torch.zeros(65, dtype=torch.bfloat16)[1:].view(4, 16))


def test_several_rows_are_left_to_the_library_where_outputs_are_many(library: HostLaunch) -> None:
    gemv = Gemv(library, processors=2)
    rows = [gemv.rows_max(torch.zeros(outputs, 8, dtype=torch.bfloat16)) for outputs in (32, 33)]
    assert rows == [ROWS_MAX, 1]
