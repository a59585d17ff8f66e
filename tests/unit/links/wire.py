"""One instance of every message, no field of it with its default, and the bytes that each has had on the wire."""

from __future__ import annotations

from pathlib import Path

from shared.wire import messages
from shared.wire.baton import Baton, Holder, HolderRank
from shared.wire.grammar import Grammar
from shared.wire.messages import Limits, Message, Row
from shared.wire.sampled import TokenLogprobs
from shared.wire.sampling_params import SamplingParams

BYTES = Path(__file__).with_name("wire_bytes.txt")

PARAMS = SamplingParams(
    max_new_tokens=64,
    seed=2**63 + 1,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    presence_penalty=-0.2,
    logit_bias={7: -1.5},
    min_new_tokens=2,
    stop_token_ids=(11, 13),
    ignore_eos=True,
    logprobs=2,
    prompt_logprobs=1,
    grammar=Grammar("regex", "a+"),
    allowed_token_ids=(5, 6),
    bad_words=((7, 8), (9,)),
)
LOGPROBS = (TokenLogprobs(-0.25, 1, ((70000, -0.25), (4, -1.5))),)
HOLDER = Holder(
    uid="prefill-0",
    epoch=2**63 + 2,
    agent="prefill-0/8000000000000002",
    metadata=b"\x00where",
    pages_address=2**47,
    page_bytes=4096,
    words_address=2**46,
    device_id=1,
    memory="VRAM",
    known_page=3,
    slices=4,
    ranks=(HolderRank("prefill-0/1", b"\x01where", 2**45, 4, 4, 2, "VRAM"),),
)
BATON = Baton(
    rid="r",
    attempt=1,
    holder=HOLDER,
    kv_format="pages",
    lease=5,
    nonce=2**40,
    kv_len=4,
    prompt_len=3,
    pages=(8, 9),
)


LIMITS = Limits(context_len=4096, page_size=16, pages=256, slots=8, vocab_size=49152, extend_tokens=512)
ROW = Row("r", 1, 2, (70000, 4), LOGPROBS * 2)
INSTANCES: tuple[Message, ...] = (
    messages.Hello(
        session=2**63 + 3,
        role="decode",
        uid="decode-0",
        epoch=2**63 + 4,
        protocol=2,
        model_name="model",
        model="weights",
        kv_format="pages",
        determinism="kernels",
        limits=LIMITS,
        eos_token_ids=(0, 2),
        understands=("Lend",),
        features=("logprobs",),
    ),
    messages.Heartbeat(),
    messages.Closed(reason="silence"),
    messages.Prefill(
        "r", 1, (1, 2, 70000), 2, PARAMS, priority=3, extra_key="salt", tenant="t", scored_len=2
    ),
    messages.Renew("r", 1),
    messages.Release("r", 1),
    messages.Cancel("r", 1),
    messages.DrainAck(),
    messages.Decode("r", 1, (1, 2, 3, 70000, 4), 3, PARAMS, BATON, priority=3, extra_key="salt", tenant="t"),
    messages.Serve("r", 1, (1, 2, 70000), 2, PARAMS, priority=3, extra_key="salt", tenant="t", scored_len=2),
    messages.Migrate("r", 1),
    messages.Foreseen(7),
    messages.Prefilled(
        "r",
        1,
        2,
        (70000,),
        BATON,
        finish="stop",
        cached_tokens=16,
        queue_seconds=0.25,
        compute_seconds=0.5,
        logprobs=LOGPROBS,
    ),
    messages.Joined("r", 1, 4096, 16, 0.125, transport="rdma", link_bytes_per_second=1e9),
    messages.Generated((ROW, Row("s", 2, 0, (5,)))),
    messages.Migrating("r", 1, 2, BATON),
    messages.Finished("r", 1, 2, "length", retractions=1),
    messages.Refused("r", 1, "no_room", detail="max_queued_requests"),
    messages.Load(
        queued=1,
        queued_tokens=2,
        running=3,
        running_tokens=4,
        free_pages=5,
        slots_free=6,
        accepting=False,
        pages_for_new=7,
        pages_a_second=0.5,
        extend_rate=1500.0,
        position_seconds=0.125,
        step_seconds=0.25,
        pages_arriving=8,
        pages_arriving_a_second=540.0,
        extend_rate_alone=2000.0,
        slots_for_new=5,
        pages_foreseen=9,
    ),
    messages.Draining(),
    messages.Failed("r", 1, 400, "grammar_too_complex", "too many states"),
    messages.Scored("r", 1, 1, LOGPROBS),
    messages.Paused("r", 1, "retracted"),
)


def recorded() -> dict[str, list[bytes]]:
    """The bytes of each message, by name: the oldest first, today's last."""
    found: dict[str, list[bytes]] = {}
    for line in BYTES.read_text(encoding="ascii").splitlines():
        name, digits = line.split()
        found.setdefault(name, []).append(bytes.fromhex(digits))
    return found


def record() -> None:
    """Add a line for every message whose bytes are new."""
    known = recorded()
    new = [
        f"{type(message).__name__} {messages.encode(message).hex()}\n"
        for message in INSTANCES
        if known.get(type(message).__name__, [b""])[-1] != messages.encode(message)
    ]
    with BYTES.open("a", encoding="ascii") as file:
        file.writelines(new)


if __name__ == "__main__":
    record()
