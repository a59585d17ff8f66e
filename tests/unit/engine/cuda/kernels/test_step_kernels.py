"""A step's own kernels: the CUDA source, run on this CPU, does what torch does, and both choose as the sampler."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.batch.schedule_batch import SlotJoin
from shared.engine.cuda.kernels.step_kernels import (
    REPORT_WORDS,
    SOURCE,
    STATE_WORDS,
    CudaKernels,
    ReferenceKernels,
    SlotWord,
    StepKernels,
    read_reports,
)
from shared.engine.sampling.logprobs import logprobs_by_numpy
from shared.engine.sampling.sampler import Sampler, signed
from shared.wire.sampling_params import SamplingParams
from tests.unit.engine.cuda.kernels.host_kernels import HostLaunch, compile_for_host

REFERENCE = ReferenceKernels()
PAGE_SIZE = 16


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_for_host(SOURCE, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=["torch", "cuda source"])
def kernels(request: pytest.FixtureRequest) -> StepKernels:
    if request.param == "torch":
        return REFERENCE
    return CudaKernels(HostLaunch(request.getfixturevalue("library")))


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)


def any_state(generator: torch.Generator, slots: int) -> Tensor:
    """States of slots in the middle of requests, a third of them greedy, and the padding slot."""
    state = integers(generator, -(2**31), 2**31 - 1, slots + 1, STATE_WORDS)  # seeds of either sign
    state[:, SlotWord.PROMPT_LEN] = integers(generator, 1, 50, slots + 1)
    state[:, SlotWord.KV_LEN] = state[:, SlotWord.PROMPT_LEN] + integers(generator, 0, 500, slots + 1)
    temperature = torch.rand(slots + 1, generator=generator) * 2
    greedy = torch.rand(slots + 1, generator=generator) < 1 / 3
    state[:, SlotWord.TEMPERATURE] = temperature.masked_fill(greedy, 0).view(torch.int32)
    state[-1] = 0
    return state


def any_logits(generator: torch.Generator, rows: int, vocab: int) -> Tensor:
    """Ties in a third of the rows, -inf in many places, and some rows of nothing else, or with NaN."""
    logits = torch.randn(rows, vocab + 3, generator=generator)[:, :vocab] * 6  # rows lie apart
    logits[::3] = logits[::3].round()
    logits[torch.rand(rows, vocab, generator=generator) < 0.2] = -torch.inf
    logits[::97] = -torch.inf
    logits[1::101, ::2] = torch.nan
    return logits


@pytest.mark.parametrize("parts", [1, 3, 32])
@pytest.mark.parametrize(("rows", "threads"), [(4000, 1), (40, 32), (40, 64), (4, 1024)], ids=str)
def test_the_source_chooses_what_torch_chooses(library: Path, rows: int, threads: int, parts: int) -> None:
    generator = generator_of(threads)
    vocab = 1009
    logits = any_logits(generator, rows, vocab)
    state = any_state(generator, slots=rows)
    slots = torch.randperm(rows, generator=generator).int()
    slots[-2:] = rows  # padding
    tokens, chosen, expected = torch.full((rows,), -1).int(), state.clone(), state.clone()
    wanted = tokens.clone()
    CudaKernels(HostLaunch(library, threads), rows * parts).chooser(logits, slots, chosen, tokens)()
    REFERENCE.chooser(logits, slots, expected, wanted)()
    assert torch.equal(tokens, wanted)
    assert torch.equal(chosen, expected)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < vocab
    possible = logits.isfinite().any(-1)
    assert bool(logits[torch.arange(rows), tokens.long()][possible].isfinite().all())


def test_tokens_are_those_of_the_sampler(kernels: StepKernels) -> None:
    generator = generator_of(5)
    rows, vocab = 600, 499
    logits = torch.randn(rows, vocab, generator=generator) * 4
    logits[::2] = logits[::2].round()
    logits[torch.rand(rows, vocab, generator=generator) < 0.1] = -torch.inf
    sampler = Sampler(slots=rows, vocab_size=vocab, eos_token_ids=[])
    state = torch.zeros(rows + 1, STATE_WORDS, dtype=torch.int32)
    seeds = [0, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63), 2**32, 2**31, -(2**31)]
    temperatures = [0.0, 1e-30, 0.1, 0.7, 1.0, 2.0]
    for slot in range(rows):
        prompt_len, kv_len = 1 + slot % 7, 1 + slot % 7 + slot % 300
        seed, temperature = seeds[slot % 9], temperatures[slot % 6]
        params = SamplingParams(max_new_tokens=100, seed=seed, temperature=temperature)
        sampler.join(SlotJoin(slot, (), 0, params, prompt_len, [0] * kv_len))
        words = torch.tensor([signed(seed)]).view(torch.int32)
        state[slot, SlotWord.SEED : SlotWord.SEED + 2] = words
        state[slot, SlotWord.TEMPERATURE] = torch.tensor([temperature]).view(torch.int32)
        state[slot, SlotWord.PROMPT_LEN], state[slot, SlotWord.KV_LEN] = prompt_len, kv_len
    slots = torch.randperm(rows, generator=generator)
    lengths = state[slots, SlotWord.KV_LEN].long()
    tokens = torch.empty(rows, dtype=torch.int32)
    kernels.chooser(logits, slots.int(), state, tokens)()
    assert torch.equal(tokens.long(), sampler.sample(logits.clone(), slots, lengths))
    assert torch.equal(state[slots, SlotWord.LAST_TOKEN], tokens)


@pytest.mark.parametrize(("rows", "threads"), [(200, 1), (20, 32), (20, 64), (2, 1024)], ids=str)
def test_the_source_tells_of_tokens_what_torch_tells(library: Path, rows: int, threads: int) -> None:
    generator = generator_of(threads)
    vocab, places = 1009, torch.randperm(rows, generator=generator).int()
    logits = any_logits(generator, rows, vocab)
    logits[:, 0] = logits[:, 0].nan_to_num(0.0, neginf=0.0)  # a row that allows nothing says nothing
    tokens, tops = integers(generator, 0, vocab, rows), integers(generator, 0, 21, rows)
    told, wanted = (torch.zeros(rows, REPORT_WORDS).int() for _ in range(2))
    CudaKernels(HostLaunch(library, threads)).logprobs(logits, places, tokens, tops, told)
    REFERENCE.logprobs(logits, places, tokens, tops, wanted)
    for own, other in zip(
        *(read_reports(each, tops.tolist(), vocab) for each in (told, wanted)), strict=True
    ):
        assert (own.rank, [at for at, _ in own.top]) == (other.rank, [at for at, _ in other.top])
        mine, theirs = ([one.logprob, *(value for _, value in one.top)] for one in (own, other))
        assert mine == pytest.approx(theirs, abs=1e-9)


def test_what_is_told_of_tokens_is_what_a_cpu_tells(kernels: StepKernels) -> None:
    generator = generator_of(7)
    rows, vocab = 30, 500
    logits = torch.randn(rows, vocab, generator=generator) * 5
    logits[::2] = logits[::2].round()
    places, tokens = torch.arange(rows).int(), integers(generator, 0, vocab, rows)
    tops, told = torch.full((rows,), 20).int(), torch.zeros(rows, REPORT_WORDS).int()
    kernels.logprobs(logits, places, tokens, tops, told)
    for row, found in enumerate(read_reports(told, tops.tolist(), vocab)):
        expected = logprobs_by_numpy(logits[row].numpy(), int(tokens[row]), 20)
        assert (found.rank, [at for at, _ in found.top]) == (expected.rank, [at for at, _ in expected.top])
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-9)
        values = [value for _, value in found.top]
        assert values == pytest.approx([value for _, value in expected.top], abs=1e-9)


def test_what_is_told_of_a_row_depends_on_nothing_but_the_row(kernels: StepKernels) -> None:
    generator = generator_of(8)
    logits = torch.randn(40, 50_000, generator=generator) * 5
    tokens, tops = integers(generator, 0, 50_000, 40), torch.full((40,), 5).int()
    crowd, alone = torch.zeros(40, REPORT_WORDS).int(), torch.zeros(1, REPORT_WORDS).int()
    kernels.logprobs(logits, torch.arange(40).int(), tokens, tops, crowd)
    for row in (0, 17, 39):
        kernels.logprobs(logits[row : row + 1], torch.zeros(1).int(), tokens[row : row + 1], tops[:1], alone)
        assert read_reports(alone, [5], 50_000) == read_reports(crowd[row], [5], 50_000)


def asked_filters(generator: torch.Generator, rows: int, vocab: int) -> tuple[Tensor, Tensor]:
    """top_k int32 [rows], all tokens in a third of them; and temperature, top_p and log(min_p) float32 [3, rows]."""
    top_k = integers(generator, 1, vocab, rows)
    top_k[::3] = integers(generator, 1, 40, len(top_k[::3]))
    top_k[1::3] = vocab
    temperature, top_p = torch.rand(2, rows, generator=generator)
    top_p[::4] = 1.0
    top_p[1::7] = 1e-6
    min_p = torch.rand(rows, generator=generator) * 0.02
    min_p[::2] = 0
    return top_k, torch.stack([temperature + 0.1, top_p, min_p.log()])


def assert_filtered_alike(
    logits: Tensor, found: Tensor, wanted: Tensor, top_k: Tensor, factors: Tensor
) -> None:
    """The same tokens stay, as they are. By sums in another order the nucleus may end one value earlier or later."""
    kept, expected = found.isfinite(), wanted.isfinite()
    assert torch.equal(found[kept], logits[kept])
    for row in (kept != expected).any(-1).nonzero()[:, 0].tolist():
        temperature, top_p, _ = factors[:, row].double()
        values = logits[row].nan_to_num(-torch.inf).double()
        ranked = values >= values.sort(descending=True).values[int(top_k[row]) - 1]
        shares = (values / temperature).masked_fill(~ranked, -torch.inf).softmax(-1)
        (edge,) = set(values[kept[row] != expected[row]].tolist())
        ends = shares[values >= edge].sum(), shares[values > edge].sum()
        assert min(abs(float(end - top_p)) for end in ends) < 1e-6


@pytest.mark.parametrize(("rows", "threads"), [(600, 1), (60, 32), (12, 64), (2, 128)], ids=str)
def test_the_source_excludes_what_torch_excludes(library: Path, rows: int, threads: int) -> None:
    generator, vocab = generator_of(threads), 5003
    logits = any_logits(generator, rows + 5, vocab)
    logits[3] = 2.5  # more equals than are kept beside
    places = torch.randperm(rows + 5, generator=generator)[:rows].int()
    logits[4, 6:] = -torch.inf  # as a mask that allows fewer than top_k
    top_k, factors = asked_filters(generator, rows, vocab)
    top_k[places == 3], top_k[places == 4] = 1, 20
    top_k[2::6] = integers(generator, 1, threads + 1, len(top_k[2::6]))  # those that are kept beside
    found, wanted = logits.clone(), logits.clone()
    CudaKernels(HostLaunch(library, threads)).filter_rows(found, places, top_k, factors)
    REFERENCE.filter_rows(wanted, places, top_k, factors)
    at = places.long()
    assert_filtered_alike(logits[at], found[at], wanted[at], top_k, factors)
    others = torch.ones(len(logits), dtype=torch.bool).index_fill(0, at, False)
    assert torch.equal(found[others].nan_to_num(7.0), logits[others].nan_to_num(7.0))
    assert bool((found[at].isfinite().sum(-1) < logits[at].isfinite().sum(-1)).any())


def test_what_is_0_for_a_device_or_infinite_keeps_the_best_token(library: Path) -> None:
    logits = torch.randn(3, 500, generator=generator_of(11))
    logits[2, 7] = torch.inf
    found, top_k = logits.clone(), torch.tensor([500, 20, 20]).int()
    factors = torch.tensor([[0.6] * 3, [1e-50, 1e-50, 0.9], [-torch.inf] * 3])
    CudaKernels(HostLaunch(library, 32)).filter_rows(found, torch.arange(3).int(), top_k, factors)
    assert found[:2].isfinite().sum(-1).tolist() == [1, 1]
    assert torch.equal(found.argmax(-1), logits.argmax(-1))


def test_the_filters_are_those_of_the_sampler(kernels: StepKernels) -> None:
    generator, rows, vocab = generator_of(9), 64, 499
    params = SamplingParams(max_new_tokens=64, seed=5, temperature=0.8, top_k=20, top_p=0.8, min_p=0.01)
    sampler = Sampler(slots=1, vocab_size=vocab, eos_token_ids=[])
    sampler.join(SlotJoin(0, (), 0, params, 0))
    logits = torch.randn(rows, vocab, generator=generator) * 2
    slots, positions = torch.zeros(rows, dtype=torch.int64), torch.arange(rows)
    expected = sampler.sample(logits.clone(), slots, positions)
    state = torch.zeros(rows + 1, STATE_WORDS, dtype=torch.int32)
    state[:, SlotWord.SEED], state[:-1, SlotWord.KV_LEN] = params.seed, positions.int()
    state[:, SlotWord.TEMPERATURE] = torch.tensor([params.temperature]).view(torch.int32)
    factors = torch.tensor([params.temperature, params.top_p, math.log(params.min_p)]).unsqueeze(1)
    top_k, each = torch.full((rows,), params.top_k).int(), torch.arange(rows).int()
    kernels.filter_rows(logits, each, top_k, factors.repeat(1, rows))
    tokens = torch.empty(rows, dtype=torch.int32)
    kernels.chooser(logits, each, state, tokens)()
    assert torch.equal(tokens.long(), expected)
    assert int(logits.isfinite().sum(-1).max()) <= params.top_k


def test_a_slot_of_padding_stays_empty_and_gets_a_token(kernels: StepKernels) -> None:
    state = any_state(generator_of(1), slots=2)
    slots, tokens = torch.tensor([2, 0, 2]).int(), torch.full((3,), -1).int()
    kernels.chooser(torch.eye(3), slots, state, tokens)()
    assert tokens[0] == 0
    assert tokens[2] == 2
    assert torch.equal(state[2], torch.zeros(STATE_WORDS).int())


@pytest.mark.parametrize("seed", range(20))
def test_a_decode_step_is_laid_out_from_tables_and_state(kernels: StepKernels, seed: int) -> None:
    generator = generator_of(seed)
    slots, rows, padding, width = 300, 150, 7, 40
    tables = integers(generator, 0, 10_000, slots + 1, width)
    state = any_state(generator, slots)
    state[:-1, SlotWord.KV_LEN] = integers(generator, 0, PAGE_SIZE * width, slots)
    picked = torch.randperm(slots, generator=generator)[:rows].int()
    picked = torch.cat([picked, torch.full((padding,), slots).int()])
    kv_lens = state[picked.long(), SlotWord.KV_LEN]
    counts = kv_lens // PAGE_SIZE + 1
    indptr = torch.cat([torch.zeros(1).int(), counts.cumsum(0).int()])
    capacity = rows * width + padding
    before, kv_indices = state.clone(), torch.full((capacity,), -1).int()
    token_ids, positions, last_page_len = (torch.full((rows + padding,), -1).int() for _ in range(3))
    kernels.prepare_decode(
        picked, indptr, tables, state, PAGE_SIZE, token_ids, positions, last_page_len, kv_indices
    )
    assert torch.equal(token_ids, before[picked.long(), SlotWord.LAST_TOKEN])
    assert torch.equal(positions, kv_lens)
    assert torch.equal(last_page_len, kv_lens % PAGE_SIZE + 1)
    pages = [tables[slot, :count] for slot, count in zip(picked.tolist(), counts.tolist(), strict=True)]
    assert torch.equal(kv_indices[: int(indptr[-1])], torch.cat(pages))
    assert bool((kv_indices[int(indptr[-1]) :] == -1).all())
    before[picked[:rows].long(), SlotWord.KV_LEN] += 1
    assert torch.equal(state, before)


@pytest.mark.parametrize("count", [0, 1, 256, 257, 3000])
def test_words_are_written_where_they_belong(kernels: StepKernels, count: int) -> None:
    generator = generator_of(count)
    words = integers(generator, -9, 9, 100, 50)
    places = torch.randperm(5000, generator=generator)[:count].int()
    entries = torch.stack([places, integers(generator, -(2**31), 2**31 - 1, count)], dim=1)
    expected = words.clone()
    expected.view(-1)[places.long()] = entries[:, 1]
    kernels.write_words(entries, words.view(-1))
    assert torch.equal(words, expected)


def test_the_reference_depends_on_shapes_alone() -> None:
    """On the meta device there are no values: whatever looks at one raises."""
    rows, slots = 6, 9
    with torch.device("meta"):
        state, column = torch.zeros(slots + 1, STATE_WORDS).int(), torch.zeros(rows).int()
        tables, indptr = torch.zeros(slots + 1, 4).int(), torch.zeros(rows + 1).int()
        REFERENCE.write_words(torch.zeros(5, 2).int(), state.view(-1))
        REFERENCE.prepare_decode(
            column, indptr, tables, state, PAGE_SIZE, column, column, column, torch.zeros(30).int()
        )
        REFERENCE.chooser(torch.zeros(rows, 31), column, state, column)()
        told = torch.zeros(rows, REPORT_WORDS).int()
        REFERENCE.logprobs(torch.zeros(rows, 31), column, column, column, told)


def test_noise_stays_within_the_bounds_that_skip_hopeless_tokens() -> None:
    least, most = (-math.log(-math.log(uniform)) for uniform in (2.0**-24, 1 - 2.0**-24))
    defined = re.search(r"#define HOPELESS (\S+)f\n", SOURCE.read_text())
    assert defined is not None
    assert least - most > float(defined[1])
