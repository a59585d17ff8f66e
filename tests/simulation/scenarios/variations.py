"""What is drawn on top of a scenario, each from a generator of its own: one more changes none of the others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

from router.core.fleet.prefix_index import BLOCK_TOKENS
from router.placement_policies import OWN_BLOCK, PolicyName
from shared.wire.sampling_params import SamplingParams
from tests.simulation.judges.groups import with_groups
from tests.simulation.oracle.model import EOS_TOKEN_IDS, VOCAB_SIZE
from tests.simulation.oracle.toy_grammar import BARREN, FIRM, FRAIL, SLOW
from tests.simulation.scenarios.bounds import bounds
from tests.simulation.scenarios.faults import (
    FALSE_PAUSE,
    FORGET,
    HANG,
    LIE,
    LOSE_RANK,
    NONSENSE,
    ROUTER_DRAINS,
    SWALLOW,
    THEFT,
    Fault,
    drawn_faults,
    rollout,
)
from tests.simulation.scenarios.scenario import (
    CONTEXT_LEN,
    START_SECONDS,
    PlannedRequest,
    ScenarioSizes,
    SimulationScenario,
)
from tests.simulation.world.versions import way_of

Variation = Callable[[SimulationScenario], SimulationScenario]

# More than a hung loop, a broken link and a late message may hide what an honest worker has.
SILENT_SECONDS_MIN = 6.0


def tenants(scenario: SimulationScenario) -> SimulationScenario:
    """Most worlds have two to four tenants, the first of them greedy. Only a troubled world refuses their tokens."""
    rng = scenario.random("tenants")
    names = [f"tenant-{number}" for number in range(rng.choice((1, 2, 3, 4)))]
    requests = [
        replace(planned, tenant=names[0] if rng.random() < 0.5 else rng.choice(names))
        for planned in scenario.requests
    ]
    sizes = replace(
        scenario.sizes,
        tenant_share_max=rng.choice((0.5, 0.8, 0.95, 1.0)),
        tenant_running_max=rng.choice((0, 0, 0, 3)),
        tenant_tokens_per_minute=0 if scenario.calm else rng.choice((0, 0, 0, 200, 2000)),
        tenant_weights=tuple(f"{name}={rng.choice((0.5, 3))}" for name in names if rng.random() < 0.3),
        share_prefix_cache=rng.random() < 0.2,
        backfill_max=rng.choice((0, 2, 32)),
    )
    if scenario.calm:
        requests += _small_requests(rng, sizes)
    return replace(scenario, sizes=sizes, requests=tuple(requests))


def _small_requests(rng: random.Random, sizes: ScenarioSizes) -> list[PlannedRequest]:
    """Another tenant comes in the middle of it all, with a few tokens."""
    return [
        replace(_short_request(rng, sizes, f"small-{number}", (0.2, 0.8), 6, (1, 4)), tenant="small")
        for number in range(rng.randint(1, 3))
    ]


def _short_request(
    rng: random.Random,
    sizes: ScenarioSizes,
    rid: str,
    seconds: tuple[float, float],  # after the first request
    prompt_len_max: int,
    new_tokens: tuple[int, int],
) -> PlannedRequest:
    return PlannedRequest(
        rid=rid,
        at=START_SECONDS + rng.uniform(*seconds),
        router=rng.randrange(sizes.routers),
        prompt=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, prompt_len_max))),
        params=SamplingParams(max_new_tokens=rng.randint(*new_tokens), seed=rng.getrandbits(32)),
    )


def router_drains(scenario: SimulationScenario) -> SimulationScenario:
    """A third of the worlds drain a router; only a troubled world cuts its answers by stopping it."""
    rng = scenario.random("router drains")
    if rng.random() > 0.35:
        return scenario
    drains = drawn_faults(rng, ROUTER_DRAINS[:1] if scenario.calm else ROUTER_DRAINS)
    return scenario.with_faults(drains)


def forgetful(scenario: SimulationScenario) -> SimulationScenario:
    """In some troubled worlds workers forget requests; there a router waits for a row less than a minute."""
    rng = scenario.random("forgetful")
    if scenario.calm or rng.random() > 0.3:
        return scenario
    return scenario.with_faults(drawn_faults(rng, (FORGET,) * 3)).sized(
        stall_seconds=rng.choice((0.5, 2.0, 10.0))
    )


def lying(scenario: SimulationScenario) -> SimulationScenario:
    """In some troubled worlds workers lie, again and again; there a router waits for a row less than a minute."""
    rng = scenario.random("lies")
    if scenario.calm or rng.random() > 0.3:
        return scenario
    lies = [
        Fault(rng.uniform(0.1, 2.0), LIE, rng.randrange(1_000_000), 0.0) for _ in range(rng.randint(4, 30))
    ]
    return scenario.with_faults(lies).sized(stall_seconds=rng.choice((0.5, 2.0, 10.0)))


def silences(scenario: SimulationScenario) -> SimulationScenario:
    """Some troubled worlds have a worker that takes requests and does nothing with them, while others come.

    It is found long before the requests are given up one by one. In the other worlds nobody may be found, so half of
    them are as impatient as they may be. In some of these worlds nothing else goes wrong.
    """
    rng = scenario.random("silences")
    least = 1.0 if scenario.calm else SILENT_SECONDS_MIN
    scenario = scenario.sized(silent_seconds=rng.choice((least, 30.0)))
    if scenario.calm or rng.random() > 0.2:
        return scenario
    scenario = scenario.sized(silent_seconds=SILENT_SECONDS_MIN, stall_seconds=2.5 * SILENT_SECONDS_MIN)
    faults = [
        Fault(START_SECONDS + rng.uniform(0.0, 1.0), SWALLOW, rng.randrange(1000), 0.0)
        for _ in range(rng.choice((1, 1, 2)))
    ]
    scenario = scenario if rng.random() < 0.4 else replace(scenario, faults=())
    others = [
        _short_request(rng, scenario.sizes, f"later-{number}", (0.3, 8.0), 140, (1, 12))
        for number in range(rng.randint(30, 60))
    ]
    return scenario.with_requests((*scenario.requests, *others)).with_faults(faults)


def long_prefixes(scenario: SimulationScenario) -> SimulationScenario:
    """In a quarter of the worlds some prompts begin with one of three prefixes so long that each has its own worker."""
    rng = scenario.random("long prefixes")
    if rng.random() > 0.25:
        return scenario
    prefixes = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(OWN_BLOCK * BLOCK_TOKENS)) for _ in range(3)]
    asking = [
        _short_request(rng, scenario.sizes, f"prefixed-{number}", (0.0, 2.0), 12, (1, 8))
        for number in range(rng.randint(6, 15))
    ]
    return scenario.with_requests(
        (*scenario.requests, *(replace(each, prompt=rng.choice(prefixes) + each.prompt) for each in asking))
    )


def short_share(scenario: SimulationScenario) -> SimulationScenario:
    """A prompt in chunks leaves nothing to short ones, a quarter or half of its steps."""
    share = scenario.random("short share").choice((0.0, 0.25, 0.5))
    return scenario.sized(short_share=share)


def ageing(scenario: SimulationScenario) -> SimulationScenario:
    """In most worlds prompts soon count as having waited for long; in a third nobody waits so long."""
    return scenario.sized(ageing_seconds=scenario.random("ageing").choice((0.02, 0.2, 5.0)))


def balance(scenario: SimulationScenario) -> SimulationScenario:
    """In most worlds streams leave workers that lack pages; how soon they count as such differs."""
    return scenario.sized(balance_steps=scenario.random("balance").choice((0, 4, 16, 64)))


def candidates(scenario: SimulationScenario) -> SimulationScenario:
    """In half of the worlds the fleet is larger than the handful of workers that a request is compared on."""
    handful = scenario.random("candidates").choice((1, 2, 8, 8))
    return scenario.sized(candidates_max=handful)


def patience(scenario: SimulationScenario) -> SimulationScenario:
    """Some troubled worlds give up a slow fetch early, so decode keeps fewer pages free of what arrives."""
    if scenario.calm:
        return scenario
    patience = scenario.random("patience").choice((0.2, 0.5, 3.0))
    return scenario.sized(fetch_seconds_max=patience)


def policies(scenario: SimulationScenario) -> SimulationScenario:
    """A third of the worlds choose workers by any policies; the others by those that `drawing` likes best."""
    rng = scenario.random("policies")
    if rng.random() > 0.35:
        return scenario
    any_policy = get_args(PolicyName)
    return scenario.sized(prefill_policy=rng.choice(any_policy), decode_policy=rng.choice(any_policy))


def without_max_tokens(scenario: SimulationScenario) -> SimulationScenario:
    """In half of the worlds some or most requests may generate until their context is full, as most clients' do."""
    rng = scenario.random("without max_tokens")
    share = rng.choice((0.0, 0.0, 0.3, 0.8))

    def freed(planned: PlannedRequest) -> PlannedRequest:
        rest = CONTEXT_LEN - len(planned.prompt)
        return planned.asking(max_new_tokens=rest)

    requests = [freed(each) if rng.random() < share else each for each in scenario.requests]
    return scenario.with_requests(requests)


def turns(scenario: SimulationScenario) -> SimulationScenario:
    """Turns of retracted requests are short, and in half of the worlds copies are cheap: else turns are long."""
    rng = scenario.random("turns")
    scenario = scenario.sized(turn_seconds=rng.choice((0.05, 0.2, 1.0)))
    if rng.random() < 0.5:
        return scenario
    cheap = replace(scenario.speed, copied_page=rng.choice((0.00001, 0.0001)))
    return replace(scenario.sized(host_pages=2 * scenario.sizes.decode_pages), speed=cheap)


def recomputation(scenario: SimulationScenario) -> SimulationScenario:
    """Most worlds compute requests again on decode for which host memory has no room, beside streams in haste.

    Some have no host memory at all.
    """
    rng = scenario.random("recomputation")
    tokens_max = rng.choice((0, 4, 4, 16))
    scenario = scenario.sized(local_tokens_max=tokens_max, itl_target_seconds=rng.choice((0.005, 0.02, 0.1)))
    return scenario.sized(host_pages=0) if tokens_max and rng.random() < 0.4 else scenario


def local_prompts(scenario: SimulationScenario) -> SimulationScenario:
    """Some worlds compute all prompts on decode, some never do; a few have no prefill worker at all."""
    rng = scenario.random("local prompts")
    chosen = rng.choice(("never", "fallback", "short", "short", "always"))
    if chosen == "always" and scenario.calm and way_of(scenario.random) in ("both", "rolling"):
        # One worker that knows the command would compute all prompts, for longer than a drain lasts.
        chosen = "fallback"
    scenario = scenario.sized(local_prefill=chosen)
    sizes = scenario.sizes
    extends = sizes.local_tokens_max and sizes.local_prefill != "never" and not sizes.reticent
    apart = scenario.fabric.partition or sizes.cell_workers_max < sizes.prefill_workers
    if not extends or apart or way_of(scenario.random) != "new" or rng.random() < 0.5:
        return scenario
    return scenario.sized(prefill_workers=0)


def prompts_for_prefill(scenario: SimulationScenario) -> SimulationScenario:
    """In some worlds a third of the clients, siblings together, want their prompts computed by prefill workers."""
    rng = scenario.random("prompts for prefill")
    if rng.random() > 0.3:
        return scenario
    rids = {planned.group[0] if planned.group else planned.rid for planned in scenario.requests}
    chosen = {rid for rid in sorted(rids) if rng.random() < 0.3}
    return scenario.with_requests(
        replace(planned, by_prefill=(planned.group[0] if planned.group else planned.rid) in chosen)
        for planned in scenario.requests
    )


def second_thoughts(scenario: SimulationScenario) -> SimulationScenario:
    """Some troubled worlds have clients that give up in crowds, at the first token of a prompt all workers have cached.

    So a cancel and its command reach a decode worker in one turn, in which the request joins at once.
    """
    rng = scenario.random("second thoughts")
    if scenario.calm or rng.random() > 0.3:
        return scenario
    sizes = scenario.sizes
    tokens = sizes.page_size * rng.randint(1, 4)
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(tokens))
    router = rng.randrange(sizes.routers)

    def request(number: int, at: float, abort_after_tokens: int | None) -> PlannedRequest:
        params = SamplingParams(max_new_tokens=4, seed=rng.getrandbits(32), ignore_eos=True)
        return PlannedRequest(
            rid=f"hasty-{number}",
            at=START_SECONDS + at,
            router=router,
            prompt=prompt,
            params=params,
            tenant="hasty",
            abort_after_tokens=abort_after_tokens,
        )

    warming = [request(number, 0.0, None) for number in range(sizes.decode_workers)]
    crowds = [request(10 * crowd + number, 0.4 * crowd, 1) for crowd in (1, 2, 3) for number in range(6)]
    return scenario.with_requests((*scenario.requests, *warming, *crowds))


def partition(scenario: SimulationScenario) -> SimulationScenario:
    """Some worlds have a prefill and a decode worker that cannot reach each other's memory; no request may suffer."""
    rng = scenario.random("partition")
    if rng.random() > 0.15:
        return scenario
    prefill = rng.randrange(scenario.sizes.prefill_workers)
    pair = f"prefill-{prefill}", f"decode-{rng.randrange(scenario.sizes.decode_workers)}"
    scenario = scenario.sized(unreachable_seconds=rng.choice((0.1, 1.0, 30.0)))
    if scenario.calm and way_of(scenario.random) != "rolling":  # there each new process has to learn it again
        scenario = scenario.sized(losses_max=1)
    return replace(scenario, fabric=replace(scenario.fabric, partition=pair))


def cells(scenario: SimulationScenario) -> SimulationScenario:
    """Some worlds are divided into two or three cells. With four routers, some of them serve two of three.

    Workers are alike there: a router knows only those of its cells, so it refuses what only others could hold.
    """
    rng = scenario.random("cells")
    if rng.random() > 0.15 or scenario.fabric.partition:
        return scenario
    scenario = scenario.sized(
        routers=4, cell_workers_max=rng.choice((2, 4)), odd_kv_format=False, small_pages=0
    )
    return scenario.with_requests(replace(planned, router=rng.randrange(4)) for planned in scenario.requests)


def rollout_of_workers(scenario: SimulationScenario) -> SimulationScenario:
    """In a rolling upgrade workers leave one after the other."""
    if way_of(scenario.random) != "rolling":
        return scenario
    return scenario.with_faults(rollout(scenario.random("rollout")))


def targets(scenario: SimulationScenario) -> SimulationScenario:
    """First tokens are wanted within a time, in some troubled worlds: in a calm one nothing is refused or dropped."""
    rng = scenario.random("targets")
    if scenario.calm or rng.random() > 0.2:
        return scenario
    return scenario.sized(ttft_target_seconds=rng.choice((0.2, 0.5, 1.0, 3.0)))


def deadlines(scenario: SimulationScenario) -> SimulationScenario:
    """In some troubled worlds half of the clients want their first token within a time of their own."""
    rng = scenario.random("deadlines")
    if scenario.calm or rng.random() > 0.3:
        return scenario
    return scenario.with_requests(
        replace(each, deadline_seconds=rng.choice((0.05, 0.3, 1.0, 5.0))) if rng.random() < 0.5 else each
        for each in scenario.requests
    )


def waits(scenario: SimulationScenario) -> SimulationScenario:
    """Little may stand before decode. Some worlds are crowded, and then nobody waits long in a troubled one."""
    rng = scenario.random("waits")
    scenario = scenario.sized(ready_seconds=rng.choice((0.1, 0.3, 0.5, 2.0)))
    if rng.random() > 0.2:
        return scenario
    scenario = scenario.sized(ready_seconds=0.1, prefill_slots=1, decode_slots=rng.choice((1, 2)))
    if scenario.calm:
        scenario = scenario.sized(max_queued_requests=200)
    else:
        scenario = scenario.sized(waiting_seconds_max=rng.choice((0.1, 0.3)))
    crowd = [
        _short_request(rng, scenario.sizes, f"crowd-{number}", (0.1, 1.0), 8, (2, 6))
        for number in range(rng.randint(40, 80))
    ]
    return scenario.with_requests((*scenario.requests, *crowd))


def launches(scenario: SimulationScenario) -> SimulationScenario:
    """Some workers compute on a GPU: a prompt's step is launched before the one that ends another has settled."""
    rng = scenario.random("launches")
    return scenario.sized(launches_cost=rng.random() < 0.6)


def grammars(scenario: SimulationScenario) -> SimulationScenario:
    """In half of the worlds a good part of the requests have a grammar.

    One that fails must be known to the routers as what it is, so only new ones get such; and a calm world fails nobody.
    """
    rng = scenario.random("grammars")
    share = rng.choice((0.0, 0.0, 0.3, 0.7))
    frail = 0.5 if way_of(scenario.random) == "new" and not scenario.calm else 0.0

    def constrained(planned: PlannedRequest) -> PlannedRequest:
        grammar = rng.choice((FRAIL, FRAIL, FRAIL, BARREN)) if rng.random() < frail else FIRM
        return planned.asking(grammar=grammar)

    requests = [constrained(each) if rng.random() < share else each for each in scenario.requests]
    return scenario.with_requests(requests)


def slow_grammars(scenario: SimulationScenario) -> SimulationScenario:
    """In a third of the worlds most requests have a slow grammar: steps have no time for all of their masks."""
    rng = scenario.random("slow grammars")
    share = rng.choice((0.0, 0.0, 0.9))

    def slowed(planned: PlannedRequest) -> PlannedRequest:
        if planned.params.grammar in (FRAIL, BARREN) or rng.random() > share:
            return planned
        return planned.asking(grammar=SLOW)

    return scenario.with_requests(map(slowed, scenario.requests))


def bad_words(scenario: SimulationScenario) -> SimulationScenario:
    """In half of the worlds some requests have bad words, and most of these a few tokens that may come at all."""
    rng = scenario.random("bars")
    share = rng.choice((0.0, 0.0, 0.3, 0.7))

    def masked(planned: PlannedRequest) -> PlannedRequest:
        tokens = rng.sample(range(VOCAB_SIZE), 10)
        may_come = () if planned.params.grammar or rng.random() < 0.3 else (*tokens, *EOS_TOKEN_IDS)
        words = tuple(tuple(rng.choices(tokens, k=rng.randint(1, 3))) for _ in range(4))
        return planned.asking(allowed_token_ids=may_come, bad_words=words)

    requests = [masked(each) if rng.random() < share else each for each in scenario.requests]
    return scenario.with_requests(requests)


def scores(scenario: SimulationScenario) -> SimulationScenario:
    """In half of the worlds whose routers know that prompts can be scored, a good part of the requests ask for it.

    All siblings ask together; the first of them is told.
    """
    rng = scenario.random("scores")
    share = rng.choice((0.0, 0.0, 0.3, 0.7)) if way_of(scenario.random) == "new" else 0.0

    def drawn(rng: random.Random) -> int:
        """How many of the likeliest are to be told; -1: no score."""
        return rng.choice((0, 1, 3)) if rng.random() < share else -1

    of_groups = scenario.random("scores of groups")
    groups = dict.fromkeys(each.group for each in scenario.requests if each.group)
    asked = {group: drawn(of_groups) for group in groups}
    requests = []
    for each in scenario.requests:
        top = asked[each.group] if each.group else drawn(rng)
        requests.append(each.asking(prompt_logprobs=top))
    return scenario.with_requests(requests)


def _strike(
    purpose: str, share: float, kinds: Sequence[str], may: Callable[[SimulationScenario], bool]
) -> Variation:
    """A share of the worlds where they may come have faults of these kinds."""

    def vary(scenario: SimulationScenario) -> SimulationScenario:
        rng = scenario.random(purpose)
        strikes = may(scenario) and rng.random() <= share
        return scenario.with_faults(drawn_faults(rng, kinds)) if strikes else scenario

    return vary


def ranks(scenario: SimulationScenario) -> SimulationScenario:
    """In some worlds the workers of a role have several ranks, and fetches come in slices; the other may have one."""
    rng = scenario.random("ranks")
    if rng.random() > 0.08:
        return scenario
    return scenario.sized(prefill_ranks=rng.choice((1, 2, 4)), decode_ranks=rng.choice((1, 2, 4)))


def retracting_ranks(scenario: SimulationScenario) -> SimulationScenario:
    """In half of the worlds whose decode workers have several ranks, little memory makes them copy pages often."""
    rng, sizes = scenario.random("retracting ranks"), scenario.sizes
    if sizes.decode_ranks == 1 or rng.random() > 0.5:
        return scenario
    alone = CONTEXT_LEN // sizes.page_size  # pages of the largest request
    speed = replace(scenario.speed, copied_page=rng.choice((0.004, 0.02)))
    return replace(scenario, speed=speed).sized(
        decode_pages=int(alone * rng.uniform(1, 1.3)),
        host_pages=3 * alone,
        small_pages=0,
        decode_slots=rng.randint(8, 16),
        init_new_token_ratio=0.0,
    )


lost_ranks = _strike(
    "lost ranks",
    0.5,
    (LOSE_RANK,),
    lambda world: not world.calm and max(world.sizes.prefill_ranks, world.sizes.decode_ranks) > 1,
)
hangs = _strike("hangs", 0.35, (HANG,), lambda world: not world.calm)
nonsense = _strike("nonsense", 0.5, (NONSENSE,), lambda _: True)  # it may cost nobody anything
false_pauses = _strike("false pauses", 0.25, (FALSE_PAUSE,) * 6, lambda _: True)  # neither may these
# It may cost a request an attempt.
thefts = _strike("thefts", 0.35, (THEFT,) * 2, lambda world: not world.calm and world.fabric.tls)

VARIATIONS: tuple[Variation, ...] = (
    bounds,
    launches,
    policies,
    short_share,
    ageing,
    balance,
    candidates,
    patience,
    without_max_tokens,  # before the crowd of `waits`: its requests stay small
    waits,
    targets,
    partition,
    long_prefixes,
    tenants,
    turns,
    recomputation,
    second_thoughts,
    cells,
    local_prompts,
    prompts_for_prefill,
    router_drains,
    hangs,
    ranks,
    retracting_ranks,
    lost_ranks,
    forgetful,
    nonsense,
    thefts,
    lying,
    silences,
    false_pauses,
    rollout_of_workers,
    with_groups,
    grammars,
    slow_grammars,
    bad_words,
    scores,
    deadlines,
)
