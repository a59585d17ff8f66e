"""What a prompt in chunks leaves of its steps to short prompts, and how they are ordered beside it."""

from __future__ import annotations

import msgspec

from shared.wire.messages import Prefill, Prefilled
from tests.unit.prefill.bench import PrefillBench
from tests.unit.scheduling.worker_bench import prefill, prompt


def of(tenant: str, rid: str, family: int, length: int) -> Prefill:
    return msgspec.structs.replace(prefill(rid, prompt(length, family)), tenant=tenant)


def lengths(bench: PrefillBench) -> list[list[int]]:
    """The tokens of each row of each step."""
    return [[len(row.token_ids) for row in rows] for rows in bench.extends]


def test_a_short_prompt_joins_the_steps_of_a_chunked_one() -> None:
    bench = PrefillBench(chunked_prefill_size=16, short_share=0.25)
    bench.send(prefill("long", prompt(64)))
    bench.turn()
    bench.send(prefill("short", prompt(3, family=2)))
    bench.run()
    assert [said.rid for said in bench.said(Prefilled)] == ["short", "long"]
    assert lengths(bench) == [[16], [12, 3], [16], [16], [4]]


def test_a_prompt_that_exceeds_the_share_joins_once_enough_has_been_saved() -> None:
    bench = PrefillBench(chunked_prefill_size=16, short_share=0.25)
    bench.send(prefill("long", prompt(96)), prefill("short", prompt(11, family=2)))
    bench.run()
    assert lengths(bench)[:4] == [[16], [16], [4, 11], [16]]


def test_short_prompts_take_no_more_than_their_share_of_the_steps() -> None:
    bench = PrefillBench(
        chunked_prefill_size=16, short_share=0.25, pages=256, words=64, max_running_requests=16
    )
    bench.send(prefill("long", prompt(160)), *(prefill(str(n), prompt(4, family=2 + n)) for n in range(40)))
    bench.run_until(lambda: any(said.rid == "long" for said in bench.said(Prefilled)))
    assert [rows[0] for rows in lengths(bench)[:13]] == [12] * 12 + [16]


def test_without_a_share_others_wait_until_a_long_prompt_is_computed() -> None:
    bench = PrefillBench(chunked_prefill_size=16, short_share=0)
    bench.send(prefill("long", prompt(64)), prefill("short", prompt(3, family=2)))
    bench.run()
    assert [said.rid for said in bench.said(Prefilled)] == ["long", "short"]


def test_a_short_prompt_passes_one_that_needs_chunks_of_its_own_beside_a_chunk_only() -> None:
    bench = PrefillBench(chunked_prefill_size=16, short_share=0.25)
    bench.send(
        prefill("a", prompt(32)),
        prefill("b", prompt(64, family=2)),
        *(prefill(f"short {n}", prompt(4, family=3 + n)) for n in range(4)),
    )
    bench.run()
    assert [said.rid for said in bench.said(Prefilled)][:2] == ["short 0", "short 1"]
    assert [rows[0] for rows in lengths(bench)][3] > 4  # b began as soon as a had ended
    assert [said.rid for said in bench.said(Prefilled)][-1] == "b"


def test_chunks_that_short_prompts_may_join_are_settled_before_the_next_is_planned() -> None:
    bench = PrefillBench(chunked_prefill_size=8, short_share=0.25)
    bench.send(prefill("a", prompt(24)))
    bench.run()
    assert bench.device.trace == [f"{act} {step}" for step in (1, 2, 3) for act in ("launch", "settle")]


def test_a_short_prompt_of_the_tenant_that_has_had_least_joins_first() -> None:
    bench = PrefillBench(chunked_prefill_size=16, short_share=0.25)
    bench.send(of("greedy", "long", 1, 96), of("greedy", "a", 2, 4), of("small", "b", 3, 4))
    bench.run()
    assert [said.rid for said in bench.said(Prefilled)] == ["b", "a", "long"]


def test_a_short_prompt_does_not_pass_one_that_waits_until_enough_is_saved_for_it() -> None:
    bench = PrefillBench(chunked_prefill_size=16, short_share=0.25)
    bench.send(prefill("long", prompt(96)), prefill("a", prompt(8, 2)), prefill("b", prompt(2, 3)))
    bench.run()
    assert [said.rid for said in bench.said(Prefilled)] == ["a", "b", "long"]
    assert lengths(bench)[:2] == [[16], [8, 8]]
