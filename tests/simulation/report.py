"""How often everything that these worlds exist for has happened; what never happened is a failure.

A simulation that is green because nothing occurs in it proves nothing. So every row of the three tables, every
message, every fault and every named path must have fired over a run of many seeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from typing import get_args

from decode import lifecycle as decode
from prefill import lifecycle as prefill
from router.core.counters import RouterCounters
from router.core.effects import RequestAborted, RequestFailed
from router.core.requests.lifecycle import TRANSITIONS
from shared.wire.messages import Closed, Heartbeat, Hello, RouterToWorker, WorkerToRouter
from tests.simulation.adversaries.lies import WAYS
from tests.simulation.scenarios.faults import FAULTS
from tests.simulation.world.clients import SimulatedClient
from tests.simulation.world.worker import SimulatedWorker
from tests.simulation.world.world import World

LINK_LAYER = (Hello, Heartbeat, Closed)  # never seen by a core
# Router and worker disagree on end tokens: no oracle could judge that output.
# A stop string in what came before the attempt that is computed now: in none of 400 seeds.
# tests/unit/router/core/queueing/test_local_prompts.py has it.
UNREACHED_ROWS = ["row ready Finished", "row extending Stopped"]
# A grammar that fails in the very step in which its request leaves: in none of 1,000 seeds.
# tests/unit/decode/test_retraction.py and test_migration.py have it.
UNREACHED_WORKER_ROWS = [
    "decode row migrating Failed",
    "decode row retracting Failed",
]
# "path joined in PREBUILT" is not expected: a request joins while no row has a page, in none of 300 seeds.
# tests/unit/decode/test_decode_scheduler.py has it.
ROWS = [f"row {state.value} {event.value}" for state, row in TRANSITIONS.rows.items() for event in row]
MESSAGES = [
    f"message {message.__name__}"
    for message in dict.fromkeys((*get_args(RouterToWorker), *get_args(WorkerToRouter)))
    if message not in LINK_LAYER
]
FABRIC = [
    "fetch slow",
    "fetch from a dead agent",
    "fetch across a partition",
    "fetch stale",
    "fetch failed",
    "fetch failed unproven",
    "fetch abandoned",
    "fetch ended late",
    "fetch endless",
    "bytes landed after the end of interest",
]
NETWORK = ["message delayed", "message lost"]
WORKER_ROWS = [
    f"{role} row {state.value} {event.value}"
    for role, table in (("prefill", prefill.TRANSITIONS), ("decode", decode.TRANSITIONS))
    for state, row in table.rows.items()
    for event in row
]
FINER = ["gone from prefill", "gone from decode", "in flight in decode", "between steps"]  # finer than states
PREFILL_PATHS = ["chunks", "cached_tokens", "leases_expired", "refused", "cancelled"]
DECODE_PATHS = [
    "waited_for_prefix",
    "waited_for_prompt",
    "full_hits",
    "cached_tokens",
    "no_room",
    "stale",
    "unreachable",
    "quarantines",
    "extra_tokens",
    "rows_without_page",
    "rows_without_mask",
    "retractions",
    "backups",
    "turns",
    "resumes",
    "recomputed",
    "local_prompts",
    "put_back",
    "mixed_steps",
    "extend_steps",
    "returned_to_router",
]
CONTINUATIONS = [
    "lost_prefill",
    "lost_decode",
    "stale",
    "unreachable",
    "stalled",
    "silent",
    "lease_ended",
    "retracted",
]
DROPPED = ["ended", "old_attempt", "other_worker", "unexpected"]
ENDS = [
    "stop at the first token",
    "length at the first token",
    "stop later",
    "length later",
    "stopped by the text layer",
    "aborted",
    "refused 400",
    "refused 429",
    "refused 500",
    "refused 503",
    "refused 504",
    "disconnected",
]
JUDGED = [  # by `fairness` and `admissions`: a claim that is never put to the test proves nothing
    "judged at router: a turn was before",
    "judged at router: nobody waits beside a free place",
    "judged at router: a stream could not migrate",
    "judged at router: no more is computed than decode takes",
    "judged at router: enough stands before decode",
    "judged at router: a wait would be too long",
    "judged at router: a stream that was cut goes on past all bounds",
    "judged at router: no worker could continue a stream",
    "judged at router: a stream that was cut comes first",
    "judged at router: a late stream comes first",
    "judged at router: a prompt is begun where pages are foreseen",
    "judged at router: a prompt gets pages that others may grow into",
    "judged at router: a prompt lets in those in front of it",
    "judged at router: a prompt that waits for a better worker keeps no room",
    "judged at router: a prompt waits for pages to be foreseen",
    "judged at router: a worker is told what is begun for it",
    "judged at decode: a router hears what others have begun",
    "judged at router: a prompt waits while links are busy",
    "judged at router: a prompt with a target is begun",
    "judged at prefill: one that has waited long goes first",
    "judged at router: a prompt is dropped for its target",
    "judged at router: a prompt is computed at decode: always",
    "judged at router: a prompt is computed at decode: no_prefill",
    "judged at router: a prompt is computed at decode: sooner",
    "judged at router: a prompt is computed at decode: sibling",
    "judged at router: a prompt goes the shorter way",
    "judged at router: a stream leaves a worker to the prompts there with its first token",
    "judged at router: a stream leaves a worker to the prompts there later",
    "judged at router: a stream is packed onto the worker with most of them",
    "judged at router: blocks have the names of all routers",
    "judged at router: a prefix goes to its own worker",
    "judged at router: what was evicted is no hit",
    "judged at router: what was found of prompts is learnt",
    "judged at router: pages that one could not fetch are kept",
    "judged at router: pages are fetched by another worker",
    "judged at router: a worker was dropped",
    "judged at router: a worker is silent",
    "judged at router: a silent worker is alone, or not yet found",
    "judged at router: the parts of a gap are the gap",
    "judged at router: a request was in the queue for decode",
    "judged at router: a pause is told by its cause",
    "judged at router: a pause of another worker or attempt",
    "judged at prefill: no more than a share",
    "judged at prefill: below its share into what is kept",
    "judged at prefill: below its share waits for input",
    "judged at prefill: short beside a chunk",
    "judged at prefill: short before a long one",
    "judged at decode: no more than a share",
    "judged at decode: below its share into what is kept",
    "judged at decode: below its share refused",
    "judged at decode: the largest keeps its pages",
    "judged at decode: room by lengths seen",
    "judged at decode: a row misses a step",
    "judged at decode: the first in line resumes",
    "judged at decode: those whose turn is over leave",
    "judged at decode: a prompt is begun at decode",
    "judged at decode: a prompt is put back for a stream",
    "judged at decode: tokens are computed again beside streams",
    "judged at decode: a tenant has used its time for masks",
    "judged at decode: rows that waited longest have masks first",
]
EXPECTED = [
    *(row for row in ROWS if row not in UNREACHED_ROWS),
    *MESSAGES,
    *(f"fault {kind}" for kind in FAULTS),
    *FABRIC,
    *NETWORK,
    *(row for row in WORKER_ROWS if row not in UNREACHED_WORKER_ROWS),
    *(f"path cancelled while {where}" for where in FINER),
    "message Novelty",
    "path a new message is not sent to an older version",
    "path a field of a later version is ignored",
    "path a process came again in a newer version",
    "path joined in DECODE",
    *(f"lie: {way}" for way in dict.fromkeys(WAYS)),
    "path a lie ended its session",
    "path a fleet is divided into cells",
    "path a fetch in slices",
    "path a lost rank cannot be read",
    "path a router has heard of a lost rank",
    "path a lease opened its own pages",
    "path a word was told to a thief",
    "path a word was told to an older reader",
    "path settled before the next launch",
    "path launched behind a step that should settle first",
    "path heard before the launch that waited for a settlement",
    "path put off for a prefix in the same batch",
    "path exit worker.drained",
    "path exit worker.ended_with_work",
    "migration migrated",
    "migration recomputed",
    "migration for balance",
    "judged at router: a stream leaves a worker that lacks pages",
    "path session ended because the loop hangs",
    "path session refused while the loop hangs",
    "path router ended",
    "path request taken while draining",
    "path unsound command refused",
    "path no large worker stayed",
    "path a deadline was missed: 429",
    "path a deadline was missed: 503",
    "refused for its tenant: tenant_queue_full",
    "refused for its tenant: tokens_per_minute",
    "path answer cut by a draining router",
    "path a group computed its prompt once",
    "path the rest of a prompt was scored by another attempt",
    "path siblings had their prompt scored once",
    *(f"prefill {name}" for name in PREFILL_PATHS),
    *(f"decode {name}" for name in DECODE_PATHS),
    *(f"continued after {cause}" for cause in CONTINUATIONS),
    *(f"dropped {cause}" for cause in DROPPED),
    *(f"end {end}" for end in ENDS),
    *JUDGED,
]


def gather(world: World) -> Counter[str]:
    """Everything that happened in a world that has ended."""
    counts = Counter(world.counts)
    for router in world.all_routers:
        _add_router(counts, router.core.counters)
        counts.update({f"judged at router: {name}": count for name, count in router.core.judged.items()})
    for worker in world.all_workers:
        _add_worker(counts, worker)
    counts.update(f"end {_end(client)}" for client in world.clients)
    return counts


def missing(counts: Counter[str]) -> list[str]:
    """What should have happened and never did."""
    return [name for name in EXPECTED if not counts[name]]


def lines(counts: Counter[str]) -> Iterable[str]:
    """The report: first what must occur, then the rest."""
    for name in (*EXPECTED, *sorted(set(counts) - set(EXPECTED))):
        yield f"{counts[name]:9d}  {name}"


def _add_router(counts: Counter[str], counters: RouterCounters) -> None:
    for bound in ("tenant_queue_full", "tokens_per_minute"):
        counts[f"refused for its tenant: {bound}"] += counters.rejections[bound]
    for row, count in counters.transitions.items():
        counts[f"row {row}"] += count
    for cause, count in counters.continuations.items():
        counts[f"continued after {cause}"] += count
    for (outcome, cause), count in counters.migrations.items():
        counts[f"migration {outcome}"] += count
        counts[f"migration for {cause}"] += count
    for cause, count in counters.dropped_messages.items():
        counts[f"dropped {cause}"] += count


def _add_worker(counts: Counter[str], worker: SimulatedWorker) -> None:
    role, counters = worker.hello.role, worker.scheduler.counters
    for judged in (worker.scheduler.judged, worker.budget.judged):
        counts.update({f"judged at {role}: {name}": count for name, count in judged.items()})
    for (state, event), count in worker.scheduler.states.taken.items():
        counts[f"{role} row {state.value} {event.value}"] += count
    for field in fields(counters):
        value = getattr(counters, field.name)
        if isinstance(value, int):
            counts[f"{role} {field.name}"] += value


def _end(client: SimulatedClient) -> str:
    outcome = client.outcome
    match outcome:
        case None:
            return "disconnected"
        case RequestAborted():
            return "cut" if client.cut else "aborted"
        case RequestFailed(status):
            return f"refused {status}"
    if tuple(client.output) != client.answer[0]:
        return "stopped by the text layer"
    return f"{client.answer[1]} {'at the first token' if len(client.output) == 1 else 'later'}"
