"""Which requests come in: what never fits, what does not fit now, and the pages kept for one request to finish."""

from __future__ import annotations

import msgspec
import pytest

from decode.admission import Admission
from decode.config import DecodeConfig
from decode.growth import SEEN_MIN
from shared.batch.req import Req
from shared.kv.kv_memory import KvMemory
from shared.kv.page_pool import PageState
from shared.wire.messages import Decode, Finished, Load, Refused
from shared.wire.sampling_params import SamplingParams
from tests.unit.decode.bench import CONTEXT_LEN, DecodeBench
from tests.unit.scheduling.worker_bench import EOS, KV_FORMAT, ORDINARY, PAGE_SIZE, VOCAB_SIZE, decode, prompt


def refusals(bench: DecodeBench) -> list[tuple[str, str]]:
    return [(said.rid, said.reason) for said in bench.said(Refused)]


def altered(command: Decode, **changes: object) -> Decode:
    return msgspec.structs.replace(command, baton=msgspec.structs.replace(command.baton, **changes))


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        pytest.param(decode("a", prompt(8), max_new_tokens=CONTEXT_LEN - 7), "too_long", id="context"),
        pytest.param(decode("a", prompt(8), max_new_tokens=34), "too_long", id="pages"),
        pytest.param(altered(decode("a", prompt(8)), kv_format="odd"), "unreachable", id="KV format"),
        pytest.param(altered(decode("a", prompt(8)), kv_len=7), "internal", id="baton and tokens differ"),
        pytest.param(decode("a", prompt(8), max_new_tokens=1), "internal", id="nothing left to generate"),
    ],
)
def test_what_this_worker_can_never_take_is_refused_at_intake(command: Decode, reason: str) -> None:
    bench = DecodeBench(pages=10)
    bench.send(command)
    bench.run()
    assert refusals(bench) == [("a", reason)]
    assert bench.holds_nothing


def test_a_request_that_fills_the_pool_and_the_context_is_taken() -> None:
    bench = DecodeBench(pages=10)
    bench.send(decode("a", prompt(8), max_new_tokens=33))
    bench.run()
    assert len(bench.tokens("a")) == 32
    assert bench.holds_nothing


def test_without_a_slot_there_is_no_room() -> None:
    bench = DecodeBench(max_running_requests=1)
    bench.send(decode("a", prompt(8)), decode("b", prompt(8, family=2)))
    bench.run()
    assert refusals(bench) == [("b", "no_room")]


def test_expected_growth_of_those_here_is_kept_free() -> None:
    """Ten pages: two requests of two pages each that may grow by four more; the ratio decides."""
    for ratio, refused in ((0.0, []), (1.0, [("b", "no_room")])):
        bench = DecodeBench(pages=10, init_new_token_ratio=ratio)
        bench.send(
            decode("a", prompt(7), max_new_tokens=17), decode("b", prompt(7, family=2), max_new_tokens=17)
        )
        bench.turn()
        assert refusals(bench) == refused


def test_transferring_requests_leave_the_room_that_the_largest_running_one_may_need() -> None:
    bench = DecodeBench(pages=12)
    bench.send(decode("large", prompt(8), max_new_tokens=25))  # up to 8 pages
    bench.turn()
    bench.fetcher.land_all()
    bench.turn()
    bench.send(*(decode(rid, prompt(8, family=n), max_new_tokens=5) for n, rid in enumerate("abc", 2)))
    bench.turn()
    assert refusals(bench) == [("c", "no_room")]


def test_what_arrives_may_have_the_pages_that_the_largest_request_cannot_want_before_it_has_landed() -> None:
    """Steps of 0.1 s, so the chat of up to 28 pages can want no more than 5 in half a second of them."""
    bench = DecodeBench(pages=32, fetch_seconds_max=0.5)
    bench.send(decode("chat", prompt(8), max_new_tokens=100))
    bench.turn()
    bench.fetcher.land_all()
    for _ in range(6):
        bench.now += 0.1
        bench.turn()
    bench.send(decode("long", prompt(80, family=2), max_new_tokens=2))  # 20 pages
    bench.turn()
    assert refusals(bench) == []
    bench.send(decode("too long", prompt(48, family=3), max_new_tokens=2))  # 12 pages
    bench.turn()
    assert refusals(bench) == [("too long", "no_room")]
    bench.run()
    assert [said.rid for said in bench.said(Finished)] == ["long", "chat"]


def test_a_request_that_lacks_pages_while_others_arrive_slowly_goes_on_when_they_have_landed() -> None:
    bench = DecodeBench(pages=28, fetch_seconds_max=0.1)
    bench.send(decode("chat", prompt(8), max_new_tokens=100))
    bench.turn()
    bench.fetcher.land_all()
    for _ in range(6):
        bench.now += 0.1
        bench.turn()
    bench.send(decode("slow", prompt(80, family=2), max_new_tokens=2))
    while not bench.core.counters.rows_without_page:
        bench.now += 0.1
        bench.turn()
    bench.run()
    assert bench.core.counters.retractions == 1
    assert [said.rid for said in bench.said(Finished)] == ["chat", "slow"]


def test_what_arriving_requests_share_is_counted_once() -> None:
    bench = DecodeBench(pages=13)
    bench.send(decode("first", prompt(8), max_new_tokens=2))
    bench.run()
    bench.send(decode("large", prompt(8, family=2), max_new_tokens=13))  # up to 5 pages
    bench.turn()
    bench.fetcher.land_all()
    bench.turn()
    bench.send(*(decode(rid, (*prompt(8), n), max_new_tokens=3) for n, rid in enumerate("abcd")))
    bench.turn()
    assert refusals(bench) == []


def test_what_arriving_requests_hold_in_the_cache_is_not_room_either() -> None:
    bench = DecodeBench(pages=12)
    bench.send(decode("first", prompt(16), max_new_tokens=2))
    bench.run()
    bench.send(decode("large", prompt(8, family=2), max_new_tokens=25))  # up to 8 pages
    bench.turn()
    bench.fetcher.land_all()
    bench.turn(2)
    bench.send(decode("a", (*prompt(16), 1), max_new_tokens=3))  # 4 cached pages and one to fetch
    bench.turn()
    assert refusals(bench) == [("a", "no_room")]


def chats_that_come_in(bench: DecodeBench, chats: int) -> int:
    """Of so many that give no bound: theirs is the rest of the context."""
    bench.send(*(decode(f"chat {n}", prompt(8, n), CONTEXT_LEN - 9) for n in range(1, chats + 1)))
    bench.turn()
    refused = len(refusals(bench))
    bench.run()
    return chats - refused


def learn_from_ended_requests(bench: DecodeBench, max_new_tokens: int) -> None:
    """Enough of them that their outputs are what is expected of the next ones."""
    for number in range(SEEN_MIN):
        bench.send(decode(f"r{number}", prompt(8, 10 + number), max_new_tokens))
        bench.run()
    bench.heard.clear()


def test_chats_without_a_bound_keep_little_room_when_outputs_are_known_to_be_short() -> None:
    bench = DecodeBench(pages=80, init_new_token_ratio=0.7)
    bench.device.answers[1] = (ORDINARY,) * 11 + (EOS,)
    assert chats_that_come_in(bench, 4) == 1
    learn_from_ended_requests(bench, max_new_tokens=100)
    assert chats_that_come_in(bench, 4) == 4


def test_chats_without_a_bound_keep_much_room_when_outputs_are_known_to_be_long() -> None:
    bench = DecodeBench(pages=80)
    bench.device.answers[1] = (ORDINARY,) * 199 + (EOS,)
    assert chats_that_come_in(bench, 4) == 4
    learn_from_ended_requests(bench, max_new_tokens=220)
    assert chats_that_come_in(bench, 4) == 1


def test_the_reserve_starts_over_when_no_request_is_left() -> None:
    bench = DecodeBench(init_new_token_ratio=0.7)
    bench.send(decode("a", prompt(8), max_new_tokens=40))
    bench.turn()
    bench.fetcher.land_all()
    bench.turn(10)
    assert bench.core._admission.ratio.value < 0.7
    bench.run()
    assert bench.core._admission.ratio.value == 0.7


def admission_beside(here: list[Req], memory: KvMemory, config: DecodeConfig | None = None) -> Admission:
    """An admission to a worker on which these requests run."""
    return Admission(
        config or DecodeConfig(),
        memory,
        256,
        KV_FORMAT,
        VOCAB_SIZE,
        settled=lambda: here,
        present=lambda: here,
    )


def test_a_page_that_retires_refuses_nobody_while_others_can_be_evicted() -> None:
    memory = KvMemory(8, PAGE_SIZE)
    admission = admission_beside([], memory)
    cached, new = (
        Req(rid, 1, "router", n, list(prompt(24, n)), 24, SamplingParams(max_new_tokens=2, seed=1))
        for n, rid in enumerate(("cached", "new"), 1)
    )
    memory.match(cached, 0)
    memory.allocate(cached, 6)
    cached.kv_len = 24
    memory.commit(cached)
    memory.release(cached)
    memory.launched_step = 1
    memory.pool.retire(memory.pool.allocate(1, PageState.OWNED), PageState.OWNED, after_step=1)
    assert memory.pool.free == 1
    assert admission.free_pages_for(new, lambda: False, 2, 0, alone=True)


@pytest.mark.parametrize("retract_steps", [20, 40])
def test_the_steps_that_fit_after_a_retraction_are_what_is_expected_of_those_that_stay(
    retract_steps: int,
) -> None:
    admission = admission_beside([], KvMemory(8, PAGE_SIZE), DecodeConfig(retract_steps=retract_steps))
    stays = Req("r", 1, "router", 1, [1, 2, 3], 3, SamplingParams(max_new_tokens=99, seed=1))
    admission.after_retraction([stays])
    assert admission.ratio.value == pytest.approx(retract_steps / 100)


def test_one_that_lands_between_two_admissions_keeps_its_pages() -> None:
    small, large, new = (
        Req(rid, 1, "router", n, [n] * 9, 8, SamplingParams(max_new_tokens=most, seed=1))
        for n, (rid, most) in enumerate({"small": 2, "large": 50, "new": 2}.items(), 1)
    )
    here = [small]
    admission = admission_beside(here, KvMemory(18, PAGE_SIZE))
    assert admission.free_pages_for(new, lambda: True, 2, 2, alone=False)
    here.append(large)
    admission.on_landed(large)  # up to 15 pages
    assert not admission.free_pages_for(new, lambda: True, 2, 2, alone=False)
    here.remove(large)
    admission.on_change()
    assert admission.free_pages_for(new, lambda: True, 2, 2, alone=False), "it has left"


def test_outputs_that_are_all_short_are_no_guess() -> None:
    memory = KvMemory(1000, PAGE_SIZE)
    config = DecodeConfig(init_new_token_ratio=0.7, retract_steps=10)
    present = [
        Req(f"r{n}", 1, "router", n, [n] * (8 + n % 20), 8, SamplingParams(max_new_tokens=240, seed=1))
        for n in range(100)
    ]
    ended = Req("ended", 1, "router", 1, [1] * 28, 8, SamplingParams(max_new_tokens=240, seed=1))
    admission = admission_beside(present, memory, config)
    for _ in range(SEEN_MIN):
        admission.on_end(ended)
    growth = admission._growth.get()
    assert growth.tokens == 2 * config.retract_steps * len(present), "none is longer than all that ended"


def test_a_guess_of_the_growth_serves_no_longer_than_until_lengths_are_known() -> None:
    memory = KvMemory(18, PAGE_SIZE)
    config = DecodeConfig(init_new_token_ratio=0.0, retract_steps=20)
    running, new, ended = (
        Req(rid, 1, "router", n, [n] * 9, 8, SamplingParams(max_new_tokens=50, seed=1))
        for n, rid in enumerate(("running", "new", "ended"), 1)
    )
    admission = admission_beside([running], memory, config)
    assert admission.free_pages_for(new, lambda: False, 2, 0, alone=False), "nothing is expected of either"
    for _ in range(SEEN_MIN):
        admission.on_end(ended)
    assert not admission.free_pages_for(new, lambda: False, 2, 0, alone=False), "both have 40 steps ahead"


def test_a_worker_tells_what_it_could_give_to_a_new_request() -> None:
    bench = DecodeBench(pages=64, init_new_token_ratio=1.0, load_seconds=0.001)
    bench.turn()
    assert (bench.said(Load)[-1].pages_for_new, bench.said(Load)[-1].pages_a_second) == (64, 0.0)
    bench.send(decode("r", prompt(7), max_new_tokens=20))
    bench.run()
    assert bench.said(Finished)
    bench.now += 0.1
    bench.turn()
    assert bench.said(Load)[-1].pages_a_second > 0
    bench.now += 20
    bench.turn()
    assert bench.said(Load)[-1].pages_a_second == 0
    bench.send(decode("s", prompt(7, 2), max_new_tokens=20))
    bench.turn(3)
    bench.fetcher.land_all()
    bench.now += 0.1
    bench.turn(2)
    assert bench.said(Load)[-1].pages_for_new < bench.said(Load)[-1].free_pages
