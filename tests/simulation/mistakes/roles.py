"""Where the mistakes are planted: what happens in the product, in plain words, and the name that it has there today.

A mistake names roles only. So a method that gets another name, or goes to another class, changes one line here. State
that a mistake needs beside what it is given has a role, too: `get` and `put` reach it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

# owner: {role: its attribute, or its key in a table}
PLACES: dict[str, dict[str, str]] = {
    # ---- pages ----
    "shared.kv.page_pool.PagePool": {"pages are given back": "retire"},
    "shared.kv.radix_cache.RadixCache": {
        "cached pages are locked": "lock",
        "cached pages are unlocked": "unlock",
        "an edge of the cache is compared": "_shared",
        "tokens are looked up in the cache": "_descend",
        "tokens are added to the cache": "_attach",
    },
    "shared.kv.kv_memory.KvMemory": {"each row of a step gets a page": "allocate_one_each"},
    # ---- leases and transfers ----
    "shared.transfer.grants.Grant": {"a lease covers pages": "covers"},
    "shared.transfer.grants.Grants": {
        "a lease is granted": "write",
        "a reader is told a word": "tell",
        "a lease holds for a reader": "holds",
    },
    "shared.wire.baton": {"an agent is named": "agent_name"},
    "tests.simulation.world.worker": {"a worker names its agent": "agent_name"},
    "tests.simulation.world.fabric.FabricWords": {"a lease begins": "open", "a lease ends": "clear"},
    "tests.simulation.world.fabric.Agent": {
        "a fetch starts at the agent": "start",
        "a fetch is abandoned at the agent": "abandon",
        "bytes of a fetch that was given up land for a while": "_end_some_day",
        "the fetches of an agent": "_reads",
        "the events of an agent that nobody polled": "_events",
        "the agent tells of a fetch": "_tell",
        "the reads of all ranks have ended": "_has_arrived",
        "the reads of all ranks are proven to have ended": "_has_ended",
        "which slices a rank reads from another": "_slices_of",
    },
    "tests.simulation.oracle.device.OracleDevice": {
        "a step writes a cell": "_append",
        "the copies of all ranks are done": "_is_copied",
    },
    "tests.simulation.world.world.World": {"a worker that lost a rank ends": "_exit_without_rank"},
    "tests.simulation.oracle.device.Pages": {"the content of a page is copied": "copy"},
    # ---- workers: the loop and its requests ----
    "shared.scheduling.event_loop.EventLoop": {
        "the loop looks at transfers": "_poll_transfers",
        "the loop settles its oldest step": "_settle_oldest",
        "the loop takes in messages": "_take_in",
        "steps in flight": "_in_flight",
        "whether launches cost time": "_launches_cost",
        "the scheduler of a loop": "_scheduler",
        "the links of a loop": "_links",
    },
    "shared.scheduling.request_states.RequestStates": {"a request at a worker changes its state": "advance"},
    "shared.scheduling.router_sessions.RouterSessions": {
        "a worker has told all routers that it drains": "drained",
        "a router knows a message": "understands",
        "a router is told a load": "_load_for",
        "a session with a router ends": "_remove",
        "pages that routers have told": "_foreseen",
        "leases of sessions": "_leases",
    },
    "shared.scheduling.queue_policy.QUEUE_POLICIES": {"requests are ordered by routing key": "routing-key"},
    "shared.scheduling.prefill_adder.PrefillAdder": {
        "a prompt fills the rest of a step": "fill",
        "the memory of prompts": "_memory",
    },
    "shared.batch.req.Req": {
        "a request joins a batch": "join",
        "a request finishes": "finish_reason",
        "how much of a prompt may come from the cache": "reusable_len",
        "tokens by which a chunk is scored": "scores",
    },
    "shared.wire.sampling_params.SamplingParams": {"a request needs its tokens to join": "needs_history"},
    "shared.worker.grammar_gate.GrammarGate": {"requests whose grammar is there go on": "_released"},
    "shared.primitives.loop_watch.LoopWatch": {"a loop hangs": "hangs"},
    # ---- sampling ----
    "shared.engine.sampling.masks.TokenMasks": {
        "bad words meet a request that joins": "join",
        "bad words see what was chosen": "take",
    },
    "shared.engine.sampling.masks.Constraints": {
        "a grammar meets a request that joins": "join",
        "a grammar takes what was chosen": "take",
    },
    "shared.engine.sampling.masks.MaskBudget": {
        "a row's turn for its mask ends": "_end_turn",
        "masks are paid for": "_pay",
        "a row with masks joins": "join",
        "tenants of slots": "_tenants",
    },
    "shared.engine.sampling.grammars.TimedMatcher": {
        "a mask is computed in time": "mask",
        "tokens a matcher has yet to take": "_behind",
    },
    # ---- prefill ----
    "prefill.scheduler.PrefillScheduler": {
        "a prefill scheduler is made": "__init__",
        "a prompt may start": "_may_start",
        "a prompt is handed over": "_hand_over",
        "what short prompts may take beside a chunk": "_short_tokens_now",
        "the most that short prompts may take": "_short_tokens_max",
        "leases that prefill keeps for others": "_words_kept",
        "settings of prefill": "_config",
    },
    "prefill.scheduler": {
        "prefill asks who is below a share": "is_below_share",
        "scores are told": "scored_messages",
    },
    "shared.scheduling.prompt_queue": {
        "waiting prompts take turns": "least_served_first",
        "those that have waited long go first": "aged_first",
        "prefill checks a command": "unsound",
    },
    # ---- decode ----
    "decode.admission": {
        "decode asks who is below a share": "is_below_share",
        "decode checks a command": "unsound",
        "decode checks a baton": "unsound_baton",
    },
    "decode.admission.Admission": {
        "the admission of decode is made": "__init__",
        "a request can never fit": "never_fits",
        "a request is counted in": "on_admitted",
        "a request is counted anew": "on_change",
        "pages kept for the largest request": "_pages_of_largest",
        "the context of decode": "_context_len",
    },
    "decode.growth.ExpectedGrowth": {"room to grow": "tokens"},
    "decode.scheduler.DecodeScheduler": {
        "a step is settled": "settle",
        "a decode worker is drained": "drained",
        "requests at decode": "_reqs",
    },
    "decode.intake.Intake": {"a request joins the running ones": "join"},
    "decode.endings.Endings": {
        "a request is dropped": "drop",
        "a request ends at decode": "end",
        "what a request holds is released": "release",
    },
    "decode.running_batch.RunningBatch": {
        "rows of a step are settled": "settle",
        "requests start in a step": "_joins",
        "requests that start": "_starting",
        "growing rows get pages": "_grant_pages",
        "a row looks ahead for its next page": "_look_ahead",
    },
    "decode.output_buffer": {"a row is made": "Row"},
    "decode.output_buffer.OutputBuffer": {"the last tokens are flushed": "flush_of"},
    "decode.transfer_queue.TransferQueue": {
        "the fetch of a request starts": "start",
        "pages of a fetch are given back": "_release_pages",
        "requests that waited for a fetch are taken": "take_waiting",
        "pages held while requests arrive": "pages_held_with",
        "pages in quarantine": "_quarantined",
        "number of the next fetch": "_next_fetch_id",
        "a fetch is removed": "_remove",
        "a request arrives": "_arrive",
    },
    "decode.retraction.Retraction": {
        "backups start": "start_backups",
        "a copy is done": "on_copy",
        "pages are copied": "_copy",
        "a retracted request resumes": "resume",
        "a request is backed up": "_back_up",
        "retracted requests": "_line",
        "a request without room in host memory comes in line": "_queue",
    },
    "decode.local_prompts.LocalPrompts": {
        "a request is computed at decode": "start",
        "chunks of what is computed at decode": "_chunks",
        "rows of what is computed at decode": "plan",
        "which prompts go first at decode": "_in_turn",
        "a prompt waits for another one at decode": "_waits",
        "prompts of a step are settled": "settle",
    },
    "decode.turns.Turns": {"how long a turn is": "seconds", "turns are over": "over"},
    "decode.migration.Migrations": {
        "migrations start": "start",
        "what has settled is leased": "lease_settled",
        "a prompt leaves decode with its first token": "hand_over",
    },
    # ---- router: requests ----
    "router.core.dispatch.RouterCore": {
        "an event of a link": "link",
        "an event of a link is taken in": "_link",
        "the router settles": "settle",
        "a client cancels": "cancel",
        "ready requests are placed": "_place_ready",
        "pending requests are placed": "_place_pending",
        "a queue is served": "_serve",
        "a request is sent to decode": "_to_decode",
        "who reads the pages of a request": "_reader",
        "streams of a router move": "_migrations",
        "requests of a router": "_requests",
    },
    "router.core.dispatch": {"the target of a request": "target_of"},
    "router.core.drain.RouterDrain": {
        "a router begins to drain": "__init__",
        "a draining router goes on": "tick",
    },
    "router.core.effects.ClientRequest": {"tokens a request is charged for": "charged_tokens"},
    "router.core.queueing.balance": {
        "how often a stream may move": "MOVES",
        "a worker was left by a stream that moves": "was_left",
    },
    "router.core.queueing.balance.Balance": {
        "a worker lacks pages": "is_pressed",
        "where a stream that leaves goes": "place",
        "pages that are left when all has gone on": "_headroom",
        "pages that are kept for tenants below their share": "_kept",
    },
    "router.core.queueing.backfill.PlacementPass": {
        "a prompt waits for a better worker": "waits_for_better",
        "a request finds no room": "found_no_room",
    },
    "router.core.queueing.backpressure.Backpressure": {
        "decode has enough in front of it": "full_lanes",
        "streams are late": "late_lanes",
        "what may stand in front of decode at any rate": "_lane_min",
    },
    "router.core.queueing.migrations": {
        "a worker was left by a stream that is placed": "was_left",
    },
    "router.core.queueing.migrations.StreamMigrations": {
        "workers not yet tried": "untried",
        "migrations are asked for": "leave_draining",
        "a stream is asked to leave": "ask_to_leave",
        "streams leave workers that lack pages": "rebalance",
    },
    "router.core.requests.lifecycle.TRANSITIONS.rows.DECODING": {
        "a decoding request loses its worker": "LOST"
    },
    "router.core.requests.live_request.LiveRequest": {
        "usage of a request": "usage",
        "a loss is counted": "count_loss",
    },
    "router.core.requests.request_queue.RequestQueue": {
        "a request enters a queue": "push",
        "a request of a queue has ended": "ended",
        "turns of a queue": "_order",
        "the place of a new request": "place_of_new",
        "the state whose requests a queue has": "_state",
    },
    "router.core.requests.request_table.RequestTable": {
        "a request may wait": "_wait",
        "tokens are told": "generate",
        "a score is told": "score",
        "a request goes back to its queue": "requeue",
        "a request is fetched": "decode",
        "a request has joined": "join",
        "effects of requests": "_effects",
    },
    "router.core.requests.reservations.Reservations": {
        "a request waits in a queue": "enqueue",
        "a request is foreseen at a worker": "foresee",
        "workers are told what is begun for them": "tell_foreseen",
        "workers for which something was begun or sent": "_foreseen_changed",
        "a command is sent": "send",
        "a request has stalled": "has_stalled",
        "what is believed of a cache is corrected": "correct_index",
        "the target of a migration is forgotten": "forget_target",
    },
    "router.core.requests.sampling_group": {"another choice of a request is made": "_choice_request"},
    "router.core.requests.sampling_group.SamplingGroup": {
        "a choice waits for the prompt": "holds_back",
        "the worker that has the prompt": "source_for",
        "the choice that computes the prompt": "_computing",
    },
    "router.core.requests.tenants.Tenant": {"the key of a tenant's cache": "cache_key"},
    "router.core.requests.tenants.Tenants": {
        "a tenant leaves": "leave",
        "a tenant is forgotten": "forget",
        "tenants with requests": "_live",
    },
    # ---- router: workers ----
    "router.core.requests.request_table": {
        "blocks are named": "block_names",
        "a hand-over begins": "HandOver",
    },
    "router.core.fleet.placement": {
        "the prefill worker of a prompt": "place_prefill",
        "a worker could decode": "could_decode",
        "workers are asked": "decode_rounds",
    },
    "router.core.fleet.workers.Fleet": {
        "a worker comes": "up",
        "a worker goes": "down",
        "a worker is counted": "_count",
        "prompts per slot": "_prefilling_per_slot",
        "a decode worker serves whole requests": "serves_whole",
    },
    "router.core.fleet.open_workers.OpenWorkers": {"a worker is open or not": "put"},
    "router.core.fleet.refused_tenants.RefusedTenants": {"a worker has refused a tenant": "add"},
    "router.core.fleet.worker.Worker": {
        "a request fits a worker": "fits",
        "a worker reports its load": "report",
        "pages are foreseen at a worker": "pages_found",
        "pages in front of a new request": "pages_in_front",
        "the links of a worker are busy": "seconds_to_fetch",
        "a worker knows a message": "understands",
        "a worker takes work": "takes_work",
        "a decode worker has a turn": "has_turn",
        "a tenant may be below its share": "may_be_below_share",
        "slots of a worker for a tenant": "_slots_for",
        "a worker gets no work for a while": "_is_withheld",
    },
    "router.core.fleet.prompt_seconds": {"what streams cost a prompt beside them": "_beside_streams"},
    "router.core.fleet.prompt_seconds.PromptSeconds": {
        "seconds until a prompt is computed": "computed",
        "what a prompt costs others": "weight",
    },
    "router.core.queueing.foresight.Foresight": {"a decode worker has pages for a prompt": "has_pages"},
    "router.core.queueing.local_prompts": {
        "how soon decode must have a prompt to get it": "_sooner",
        "until when a prompt waits for a turn": "_waits_until",
    },
    "router.core.queueing.local_prompts.LocalPlacement": {
        "who computes a prompt": "way",
        "some decode worker computes": "_any_could_serve",
        "decode workers that a prompt need not wait past": "_worth",
    },
    "router.core.queueing.stream_packing.StreamPacking": {
        "streams are packed": "is_wanted",
        "the time for prompts in this pass": "_times",
        "the time for prompts of KV groups": "_prompt_time",
        "workers that may have little time for prompts": "_fleet",
        "a worker may get more streams": "_may_fill",
    },
    "router.core.queueing.stranded_streams.StrandedStreams": {
        "a worker could continue a stream": "_is_served"
    },
    "router.core.worker_events.books": {
        "a failed request is struck from the books": "strike",
        "the books are counted anew": "_count_anew",
    },
    "router.core.worker_events.silent_workers": {"others that must have answered": "COMPARED_MIN"},
    "router.core.worker_events.silent_workers.SilentWorkers": {
        "a worker is silent": "_is_silent",
        "others have answered meanwhile": "_others_answered",
        "a worker is found silent": "_convict",
        "requests of silent workers": "_requests",
        "settings of silence": "_settings",
    },
    "router.core.worker_events.worker_faults.WorkerFaults": {
        "a worker is dropped": "drop",
        "the request of a fault is struck": "_strike",
        "effects of a fault": "_effects",
        "requests at a fault": "_requests",
        "workers at a fault": "_fleet",
    },
    "router.core.worker_events.worker_replies": {
        "more tokens than were asked for": "_exceeds",
        "a router checks a baton": "unsound_baton",
    },
    "router.core.worker_events.worker_replies.WorkerReplies": {
        "a worker could not fetch": "_unreachable",
        "a request lost its worker": "_lost",
        "a worker keeps a request that does not run": "paused",
        "requests that are spoken of": "_requests",
    },
    "router.discovery.known_pods": {"a fleet is divided": "divide", "cells get routers": "served_cells"},
    "shared.wire.messages.Hello": {"a peer reads a message": "reads"},
    # ---- engine ----
    "shared.engine.attention.protocol.PlanGuard": {"a plan waits for the one before": "__enter__"},
    "shared.engine.checkpoint.kv_cache.KVCache": {"pages are restored": "restore"},
    "shared.engine.cuda.adjustments.Adjustments": {"adjustments are staged": "stage"},
    "shared.engine.cuda.device.CudaDevice": {
        "the host waits for a step": "_reach",
        "what a step has sampled": "_sampled",
        "steps that are over": "completed",
        "steps that are launched": "_launched",
        "copies that are over": "copies_done",
        "copies under way": "_copies",
    },
    "shared.engine.cuda.extends.Extends": {
        "prompts of a step begin": "begin",
        "a run of prompt is staged": "stage",
    },
    "shared.engine.cuda.extend_graphs.ExtendGraphs": {
        "a step of prompts is laid out for its graph": "_laid_out",
        "a graph of prompts gets its step": "_fill",
    },
    "shared.engine.cuda.graphs.DecodeGraphs": {
        "a batch is staged for its graph": "stage",
        "the plan of a batch is forgotten": "forget_plan",
        "the plan of a batch": "_planned",
        "the slot of rows of padding": "_padding_slot",
    },
    "shared.engine.cuda.kernels.step_kernels.ReferenceKernels": {
        "a kernel prepares a decode step": "prepare_decode"
    },
    "shared.engine.cuda.sampling.Sampling": {
        "tokens are chosen": "run",
        "a choice is read": "read",
        "masks are uploaded": "_upload",
        "a choice is computed": "_choose",
        "results that are free": "_free",
        "staging of masks": "_mask_staging",
    },
    "shared.engine.cuda.sampling.StagedRows": {"the token before a mask is known": "is_known"},
    "shared.engine.cuda.slots.DeviceWords": {
        "words of slots are made": "__init__",
        "words are staged": "stage",
    },
    "shared.engine.cuda.slots.SlotMirror": {
        "a batch changes slots": "change",
        "rows that sat out go back on the host": "set_back",
        "rows that sat out go back on the device": "_one_back",
    },
    "shared.engine.cuda.staging.Staging": {
        "the use of a staging ends": "end",
        "the ring of a staging": "_ring",
        "the views of a staging": "_views",
    },
    "shared.engine.cuda.kernels.step_kernels.ReportBuffers": {
        "tokens of a run are on the device": "on_device"
    },
    "tests.doubles.late_stream.LateStream": {"a stream waits for another": "wait_for"},
}
ROLES = {role: (owner, attribute) for owner, roles in PLACES.items() for role, attribute in roles.items()}


def owner_of(role: str) -> Any:
    """The class, module or table where a role is."""
    names = ROLES[role][0].split(".")
    depth = next(n for n in range(len(names), 0, -1) if _is_module(".".join(names[:n])))
    found: Any = importlib.import_module(".".join(names[:depth]))
    for name in names[depth:]:
        found = value_in(found, name)
    return found


def value_in(owner: Any, attribute: str) -> Any:
    """The attribute of an object, or the entry of a table."""
    return owner[_key(owner, attribute)] if isinstance(owner, dict) else getattr(owner, attribute)


def get(owner: Any, role: str) -> Any:
    """What an object has for a role: its state, or a method of it."""
    return getattr(owner, ROLES[role][1])


def put(owner: Any, role: str, value: Any) -> None:
    """Give an object another state for a role."""
    setattr(owner, ROLES[role][1], value)


def set_in(owner: Any, attribute: str, value: Any) -> None:
    """Set the attribute of an object, or the entry of a table."""
    if isinstance(owner, dict):
        owner[_key(owner, attribute)] = value
    else:
        setattr(owner, attribute, value)


def _key(table: dict[Any, Any], name: str) -> Any:
    """The key that is a name, or the member of an enum that has it."""
    return next(key for key in table if getattr(key, "name", key) == name)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what stands before the last dot is no package
        return False
