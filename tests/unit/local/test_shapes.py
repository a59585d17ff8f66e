"""How many processes `segue up` starts on a machine with so many GPUs, and which of them each may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.local.config import load_local
from shared.local.shapes import (
    ONE_GPU_EACH,
    Shape,
    built_for_cuda,
    gpus_for,
    gpus_of,
    gpus_to_use,
    has_driver,
    names_cuda,
    require_gpus,
    shape_of,
)
from shared.local.up import shaped
from shared.primitives.errors import ConfigError


@pytest.mark.parametrize(
    ("gpus", "flags", "shape"),
    [
        (0, [], (1, 1)),
        (0, ["--prefill", "0"], (0, 1)),
        (1, [], (0, 1)),
        (1, ["--prefill", "1"], (1, 1)),
        (1, ["--decode", "2"], (0, 2)),
        (4, [], (0, 4)),
        (4, ["--prefill", "1"], (1, 3)),
        (4, ["--prefill", "2", "--decode", "2"], (2, 2)),
        (2, ["--local-prefill", "never"], (1, 1)),
        (1, ["--local-tokens-max", "0"], (1, 1)),
    ],
)
def test_the_shape_follows_the_gpus_unless_it_is_given(
    gpus: int, flags: list[str], shape: tuple[int, int]
) -> None:
    settings, said = shaped(load_local(flags, {}), gpus)
    assert (settings.config.prefill, settings.config.decode) == shape
    given = {flag for flag in flags if flag in ("--prefill", "--decode")}
    assert bool(said) == (gpus > 0 and len(given) < 2)


def test_one_gpu_is_told_in_a_sentence_how_to_divide_it() -> None:
    _, said = shaped(load_local([], {}), 1)
    assert said == "one GPU: one process computes prompts and streams; --prefill 1 divides it"
    _, said = shaped(load_local([], {}), 4)
    assert said == "4 GPUs: 0 prefill and 4 decode processes; --prefill and --decode change that"


def test_gpus_are_the_devices_of_the_driver_that_may_be_used(tmp_path: Path) -> None:
    assert gpus_of({}, tmp_path) == []
    assert gpus_of({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == []
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert gpus_of({}, tmp_path) == ["0", "2", "10"]
    assert gpus_of({"CUDA_VISIBLE_DEVICES": "2, GPU-7"}, tmp_path) == ["2", "GPU-7"]
    assert gpus_of({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_in_a_wsl_the_driver_is_that_of_windows(tmp_path: Path) -> None:
    driver = tmp_path / "libcuda.so.1"
    assert not has_driver(tmp_path, driver)
    driver.touch()
    assert has_driver(tmp_path, driver)
    assert gpus_of({}, tmp_path, driver) == ["0"]
    assert gpus_of({"CUDA_VISIBLE_DEVICES": "1,2"}, tmp_path, driver) == ["1", "2"]
    assert gpus_of({"CUDA_VISIBLE_DEVICES": ""}, tmp_path, driver) == []


@pytest.mark.parametrize(
    ("device", "with_cuda", "used"),
    [("auto", True, True), ("auto", False, False), ("cpu", True, False), ("cuda-on-cpu", True, False),
     ("cuda", False, True)],  # a worker refuses the last in a sentence
)  # fmt: skip
def test_gpus_count_where_workers_will_compute_on_them(device: str, with_cuda: bool, used: bool) -> None:
    found = ["0", "1"]
    gpus, why_none = gpus_to_use(device, found, with_cuda=with_cuda)
    assert gpus == (found if used else [])
    assert ("built without CUDA" in why_none) == (device == "auto" and not with_cuda)
    assert gpus_to_use("auto", [], with_cuda=False) == ([], "")


def test_torch_tells_without_being_loaded_whether_it_is_built_for_cuda() -> None:
    assert names_cuda("debug = False\ncuda: Optional[str] = '13.0'\ngit_version = 'c'\n")
    assert names_cuda("cuda = '13.0'\n")
    assert not names_cuda("cuda: Optional[str] = None\ngit_version = 'cuda = 1'\n")
    assert not built_for_cuda()  # the locked one


def test_each_worker_has_a_gpu_of_its_own_while_there_are_several() -> None:
    assert gpus_for(["0", "GPU-7"], [1, 1, 1]) == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "GPU-7"},
        {"CUDA_VISIBLE_DEVICES": "0"},
    ]
    assert gpus_for(["0"], [1, 1]) == gpus_for([], [1, 1]) == [{}, {}]
    assert shape_of(2, None, None, whole=True) == (0, 2)


def test_workers_of_several_gpus_share_none() -> None:
    settings, words = shaped(load_local(["m", "--tensor-parallel-size", "2"], {}), 5)
    assert (settings.config.prefill, settings.config.decode, settings.gpus_each) == (0, 2, (2, 2))
    assert words.startswith("5 GPUs: 0 prefill and 2 decode processes")
    gpus = ["0", "1", "GPU-7", "3", "4"]
    assert gpus_for(gpus, [2, 2]) == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "GPU-7,3"}]
    assert gpus_for([], [2, 1]) == [{}, {}]
    require_gpus(5, Shape(0, 2), Shape(2, 2))
    require_gpus(0, Shape(0, 2), Shape(2, 2))
    require_gpus(1, Shape(1, 1), ONE_GPU_EACH)


def test_prefill_and_decode_have_numbers_of_gpus_of_their_own() -> None:
    argv = ["m", "--prefill", "1", "--prefill-gpus", "1", "--decode-gpus", "2"]
    settings, words = shaped(load_local(argv, {}), 5)
    assert settings.gpus_each == (1, 2)
    assert words.startswith("5 GPUs: 1 prefill and 2 decode processes")
    assert [each["CUDA_VISIBLE_DEVICES"] for each in gpus_for(list("01234"), [1, 2, 2])] == [
        "0",
        "1,2",
        "3,4",
    ]
    assert settings.roles["decode"].flags[-2:] == ["--tensor-parallel-size=2", "--kv-layout=head-major-1"]


def test_who_gives_prefill_gpus_has_a_prefill_worker() -> None:
    settings, words = shaped(load_local(["m", "--prefill-gpus", "2"], {}), 4)
    assert (settings.config.prefill, settings.config.decode) == (1, 2)
    assert words.startswith("4 GPUs: 1 prefill and 2 decode processes")


def test_all_workers_have_the_layout_of_those_with_several_gpus() -> None:
    def layouts(*flags: str) -> list[object]:
        roles = load_local(["m", *flags], {}).roles
        return [getattr(roles[role].config, "kv_layout") for role in ("prefill", "decode")]  # noqa: B009

    assert layouts() == ["auto", "auto"]
    assert layouts("--decode-gpus", "2") == ["head-major-1", "head-major-1"]
    assert layouts("--kv-layout", "page-major-1") == ["page-major-1", "page-major-1"]


def test_gpus_that_are_too_few_are_refused() -> None:
    sentence = "--prefill 1 with 1 GPUs each and --decode 2 with 2 each need 5 GPUs, there are 3"
    with pytest.raises(ConfigError, match=sentence):
        require_gpus(3, Shape(1, 2), Shape(1, 2))
