"""A prefill and a decode worker that answer by script, over links in memory, and a router around them.

`RunningRouter` is the real application on the real server, in a thread of its own: clients reach it over HTTP. Only the
workers are written for tests; they follow the messages' contract and have no model.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from types import TracebackType

import httpx2
import openai
import uvloop

from router.access.key_ring import KeyRing
from router.access.keyed_clients import KeyedClients
from router.admin import RouterPages
from router.config import RouterConfig
from router.core.dispatch import RouterCore
from router.core.effects import RequestFailed
from router.discovery.router_peers import RouterPeers
from router.gateway_metrics import GatewayMetrics
from router.listener.connections import ClientConnections
from router.listener.server import Server, listen
from router.listener.tls import certificate_of
from router.live.endpoint import LiveViews
from router.openai.answers.resumable_streams import Resuming
from router.openai.app import make_app
from router.openai.prompts.prompts import Prompts
from router.openai.serving import OpenAIServing
from router.shell import RouterShell
from router.text.model_folder import read_sampling_defaults
from router.text.tokenizer import Tokenizer
from shared.links.events import PeerDown, Received
from shared.process.admin_port import AdminPort
from shared.process.health import Health, probe_pages
from shared.process.metrics import Metrics
from shared.wire.messages import (
    UNDERSTOOD,
    Cancel,
    Decode,
    Finished,
    FinishReason,
    Generated,
    Hello,
    Limits,
    Load,
    Message,
    Prefill,
    Prefilled,
    Row,
    Scored,
)
from shared.wire.sampled import Logprobs, TokenLogprobs
from shared.wire.sampling_params import SamplingParams
from tests.doubles.memory_links import MemoryLinks
from tests.unit.router.deployment import baton, hello
from tests.unit.router.tiny_model import CONTEXT_LEN, END_ID

MODEL = "tiny"
LINK_SECRET = b"the secret of all routers"
LIMITS = Limits(context_len=CONTEXT_LEN, page_size=16, pages=100_000, slots=10_000, vocab_size=400)
LOAD = Load(free_pages=100_000, slots_free=10_000)


FEATURES = ("logprobs", "prompt_logprobs")


def logprobs_of(token_ids: tuple[int, ...], params: SamplingParams) -> Logprobs:
    """What these workers say of tokens: a figure of their own for each."""
    if params.logprobs < 0:
        return ()
    return tuple(
        TokenLogprobs(-token_id / 8, 1, tuple((token_id + at, -float(at)) for at in range(params.logprobs)))
        for token_id in token_ids
    )


def scores_of(prefill: Prefill) -> Logprobs:
    """What they say of a prompt's tokens, but for the first."""
    top = prefill.params.prompt_logprobs
    return tuple(
        TokenLogprobs(-token_id / 16, 2, tuple((token_id + at, -float(at)) for at in range(1, top + 1)))
        for token_id in prefill.token_ids[1 : prefill.prompt_len]
        if top >= 0
    )


@dataclass
class Script:
    """What the workers do with a request."""

    output: Callable[[Prefill], tuple[int, ...]] = lambda prefill: prefill.token_ids[:1] * 8 + (END_ID,)
    silent: bool = False  # prefill takes the request and says nothing
    stalled: bool = False  # decode takes the request and says nothing
    tokens_a_row: int = 1
    endless: bool = False  # the first token is repeated up to max_new_tokens
    on_demand: bool = False  # decode takes a step when `step` is called, and none by itself


@dataclass
class ScriptedWorkers:
    """Both roles; `turn` lets them read and answer."""

    script: Script = field(default_factory=Script)
    limits: Limits = LIMITS
    features: tuple[str, ...] = FEATURES
    cached_tokens: int = 0  # of each prompt, as prefill says
    model: str = MODEL
    ends: tuple[int, ...] = (END_ID,)  # tokens that end an answer
    prefills: list[Prefill] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _steps: dict[str, deque[Row | Finished]] = field(default_factory=dict)
    _awake: bool = False

    def __post_init__(self) -> None:
        self.router = WakingLinks(
            Hello(session=0, role="router", uid="r", epoch=1, understands=UNDERSTOOD["router"]), self
        )
        said = {"model_name": self.model, "limits": self.limits, "features": self.features}
        self.prefill = MemoryLinks(hello("prefill", "p", **said))
        self.decode = MemoryLinks(hello("decode", "d", **said))
        self.on_sent: Callable[[], None] = lambda: None

    def link(self) -> None:
        for worker in (self.prefill, self.decode):
            self.router.link(worker)
            worker.send(self.router.name, LOAD)

    def lose_decode(self) -> None:
        self.router.drop(self.decode)

    def go_on(self) -> None:
        """Let decode, which has stalled, answer what it was sent."""
        self.script.stalled = False
        for decode in self.decodes:
            self._generated(decode)
        self.wake()

    def wake(self) -> None:
        """Take a turn when the loop comes round, once however often this was called."""
        if not self._awake:
            self._awake = True
            asyncio.get_running_loop().call_soon(self.turn)

    def turn(self) -> None:
        """Read and answer everything that has come; then one step of every request that is being decoded."""
        self._awake = False
        for worker in (self.prefill, self.decode):
            for event in worker.receive(0):
                if isinstance(event, Received):
                    self._answer(event.message)
                elif isinstance(event, PeerDown):
                    self._steps.clear()
        if not self.script.on_demand:
            self._step()
        self.on_sent()

    def step(self) -> None:
        """One step of every request that is being decoded."""
        self._step()
        self.on_sent()

    def _step(self) -> None:
        rows = []
        for steps in list(self._steps.values()):
            match steps.popleft():
                case Row() as row:
                    rows.append(row)
                case Finished() as finished:
                    self._steps.pop(finished.rid)
                    self.decode.send(self.router.name, finished)
        if rows:
            self.decode.send(self.router.name, Generated(tuple(rows)))
        if self._steps:
            self.wake()

    def _answer(self, message: Message) -> None:
        if isinstance(message, Prefill):
            self.prefills.append(message)
            if not self.script.silent:
                self._prefilled(message)
        elif isinstance(message, Decode):
            self.decodes.append(message)
            if not self.script.stalled:
                self._generated(message)
        elif isinstance(message, Cancel):
            self.cancelled.append(message.rid)
            self._steps.pop(message.rid, None)

    def _prefilled(self, prefill: Prefill) -> None:
        output = self.script.output(prefill)
        if self.script.endless:
            output = output[:1] * prefill.params.max_new_tokens
        self.outputs[prefill.rid] = output
        index = len(prefill.token_ids) - prefill.prompt_len
        finish: FinishReason | None = "stop" if output[index] in self.ends else None
        rid, attempt = prefill.rid, prefill.attempt
        page_size = self.limits.page_size or 16
        pages = baton(
            rid, attempt, len(prefill.token_ids), "p", prompt_len=prefill.prompt_len, page_size=page_size
        )
        told = logprobs_of(output[index : index + 1], prefill.params)
        answer = Prefilled(
            rid, attempt, index, (output[index],), pages, finish, self.cached_tokens, logprobs=told
        )
        if scores := scores_of(prefill):
            half = max(1, len(scores) // 2)  # they come in parts
            for index, part in ((1, scores[:half]), (1 + half, scores[half:])):
                if part:
                    self.prefill.send(self.router.name, Scored(rid, attempt, index, part))
        self.prefill.send(self.router.name, answer)

    def _generated(self, decode: Decode) -> None:
        rid, attempt = decode.rid, decode.attempt
        output = self.outputs[rid][: decode.params.max_new_tokens]
        first = len(decode.token_ids) - decode.prompt_len
        step = self.script.tokens_a_row
        starts = range(first, len(output), step)
        parts = ((index, output[index : index + step]) for index in starts)
        rows = [Row(rid, attempt, index, part, logprobs_of(part, decode.params)) for index, part in parts]
        reason: FinishReason = "stop" if output[-1] in self.ends else "length"
        self._steps[rid] = deque([*rows, Finished(rid, attempt, len(output), reason)])


class WakingLinks(MemoryLinks):
    """The router's end: what it sends wakes the workers at the loop's next turn."""

    def __init__(self, hello: Hello, workers: ScriptedWorkers):
        super().__init__(hello)
        self._workers = workers

    def send(self, peer: str, message: Message) -> None:
        super().send(peer, message)
        self._workers.wake()


loaded = cache(Tokenizer)  # takes 50 ms; no test changes the tokenizer of a folder that was served


class RunningRouter:
    """A router on a free port; a context manager. `send_bytes` is what the kernel may hold of an answer."""

    def __init__(
        self,
        folder: Path,
        *,
        limits: Limits = LIMITS,
        features: tuple[str, ...] = FEATURES,
        linked: bool = True,
        send_bytes: int = 0,
        uid: str = "router",
        model: str = MODEL,
        **settings: object,
    ):
        self.uid = uid
        self.peers: dict[str, str] = {}  # URLs of the other routers it knows, by uid
        self.routers_ready = 1
        self.keyed: KeyedClients | None = None
        self.workers = ScriptedWorkers(limits=limits, features=features, model=model)
        self._settings = RouterConfig(served_model_name=model, **settings)  # type: ignore[arg-type]
        self.folder = folder
        given = self._settings
        self.tokenizer = loaded(
            folder, given.template_seconds_max, given.tool_call_parser, given.reasoning_parser
        )
        self._linked = linked
        self.health = Health(60)
        self._listener = listen("127.0.0.1", 0)
        if send_bytes:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        scheme = "https" if given.tls_cert else "http"
        self.url = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        # certificates take 20 ms to load
        self.http = httpx2.Client(base_url=self.url, timeout=20, verify=False)
        self.metrics = Metrics("router")
        self.admin = AdminPort("127.0.0.1", 0, probe_pages(self.health, self.metrics))
        self.admin_url = f"http://127.0.0.1:{self.admin.port}"

    def __enter__(self) -> RunningRouter:
        self._thread.start()
        assert self._running.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        self._loop.call_soon_threadsafe(self._server.stop)
        self._thread.join(10)
        assert not self._thread.is_alive()

    @cached_property
    def openai(self) -> openai.OpenAI:
        """A client of OpenAI's, on connections of `http`."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=self.http)

    def says(self, text: str, *, end: bool = True, row: int = 1) -> int:
        """Let the workers answer `text` from now on; returns its length in tokens."""
        output = self.tokenizer.encode(text, add_special_tokens=False) + ((END_ID,) if end else ())
        self.workers.script = Script(output=lambda _: output, tokens_a_row=row)
        return len(output)

    @property
    def last_prefill(self) -> Prefill:
        return self.workers.prefills[-1]

    @property
    def prompt(self) -> str:
        """The one that the workers were given last."""
        return self.tokenizer.decode_all(self.last_prefill.token_ids)

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` on the router's loop and wait for it."""
        done = threading.Event()

        def act() -> None:
            action()
            self.shell.links_ready()
            done.set()

        self._loop.call_soon_threadsafe(act)
        assert done.wait(10)

    def _publish(self) -> None:
        self.metrics.publish(self.core.counters)
        self.metrics.publish(self.clients.counters)
        self.metrics.publish(self.resuming.counters)
        self.metrics.publish(self.serving.http_counters)
        self.metrics.publish(self.serving.prompts.counters)
        if self.keyed:
            self.metrics.publish(self.keyed.counters)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.core = RouterCore(self._settings, self._loop.time())
        self.shell = RouterShell(self.core, self.workers.router)
        self.workers.on_sent = self.shell.links_ready
        prompts = Prompts(self.tokenizer, self._settings)
        self.resuming = Resuming(LINK_SECRET)
        defaults = read_sampling_defaults(self.folder)
        self.serving = serving = OpenAIServing(
            self.shell, self.tokenizer, prompts, self._settings, defaults, self.resuming
        )
        if self._linked:
            self.workers.link()
            self.shell.links_ready()
        self.health.become_ready()
        self.clients = ClientConnections(self._settings)
        router_peers = RouterPeers(self.uid, lambda: self.peers)
        live = LiveViews(self.core, self.shell, router_peers, self.uid, lambda: self.peers, self._settings)
        self.feed = live.feed
        pages = RouterPages(
            probe_pages(self.health, self.metrics),
            self._publish,
            self.shell,
            router_peers,
            self._settings.prompts_max,
            live.on_admin,
        )
        self.admin.answer = pages.answer
        failure = RequestFailed(503, "shutting down")
        if self._settings.api_keys_file:
            ring = KeyRing(self._settings.api_keys_file)
            self.keyed = KeyedClients(ring, self._settings, lambda: self.routers_ready)
        guard = self.keyed.guard if self.keyed else lambda app: app
        gateway = GatewayMetrics(self.core, self.metrics, self._settings)
        behind_keys = lambda app: gateway.around(guard(app))  # noqa: E731
        app = make_app(serving, self.health, router_peers.draw_rid, behind_keys, live.on_api)
        self.certificate = certificate_of(self._settings)
        end_answers = partial(serving.fail_all, failure)

        def become_unready() -> None:
            self.health.start_draining()
            self.feed.close()

        self._server = Server(
            app, self._settings, self.clients, become_unready, end_answers, self.certificate
        )
        self._loop.call_soon(self._running.set)
        await self._server.serve(sockets=[self._listener])
        await asyncio.to_thread(self.admin.close)
        await router_peers.close()
        self.shell.close()
        prompts.close()
