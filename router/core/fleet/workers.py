"""The workers of a router: those that are up, in the order they came, and the models they have served.

A worker is known by its link peer, `<uid>/<epoch>`; one that restarted is another worker.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from math import inf

from router.core.fleet.open_workers import OpenWorkers
from router.core.fleet.prefix_index import PrefixIndex
from router.core.fleet.told_rates import FleetRates
from router.core.fleet.worker import KvGroup, Worker
from router.placement_policies import LocalPrefill, Serving, serving_of
from shared.wire.messages import PROTOCOL, WORKER_ROLES, Hello, Role

MODELS_MAX = 64  # names remembered after their last worker has gone

# a model's name, and the fingerprints of its weights and of what computes with them
Backend = tuple[str, str, str]


class Fleet:
    """All workers that are up, in the order they came, and the models they have served."""

    def __init__(
        self,
        prefixes: PrefixIndex,
        models: tuple[str, ...] = (),
        indexed: Collection[Role] = WORKER_ROLES,
        prefilling_per_slot: float = 1.0,
        *,
        local_prefill: LocalPrefill = "never",
    ):
        self._local_prefill = local_prefill
        self._whole: Counter[str] = Counter()  # … such that do not drain, by name of the model
        self.prefixes = prefixes  # of the workers of the roles `indexed`
        self.workers: dict[str, Worker] = {}
        self._models: OrderedDict[str, int | None] = OrderedDict.fromkeys(models)  # name: context in tokens
        self._named = frozenset(models)
        self._indexed = indexed
        self._prefilling_per_slot = prefilling_per_slot
        self._open: dict[Role, OpenWorkers[Worker]] = {role: OpenWorkers() for role in WORKER_ROLES}
        self._by_role: dict[Role, list[Worker]] = {role: [] for role in WORKER_ROLES}
        self._taking: Counter[Role] = Counter()  # workers that do not drain
        self._partners: Counter[tuple[Role, str, str]] = Counter()  # … by role, model and KV format
        # What decode workers that do not drain can hold and know, by KV group; as of so many `changes`.
        self._readers: dict[KvGroup, set[tuple[float, frozenset[str]]]] = {}
        self._readers_at = 0
        self._backends: Counter[Backend] = Counter()  # … and those that drain
        self.only_versions: dict[str, str] = {}  # fingerprint by name, where there is one
        self.rates = FleetRates()
        self.changes = 0  # workers that came, went or began to drain so far
        self._arrivals = 0
        self._choices = 0

    def up(self, peer: str, hello: Hello) -> Worker | str:
        """Take a worker in; or return the reason, in one word, why it cannot be used."""
        assert peer not in self.workers, peer
        if hello.protocol != PROTOCOL:
            return "protocol"
        if hello.role == "router":
            return "role"
        self._arrivals += 1
        self.changes += 1
        prefilling_max = max(1, int(hello.limits.slots * self._prefilling_per_slot))
        worker = Worker(
            peer,
            hello,
            self._arrivals,
            prefilling_max=prefilling_max,
            changed=self._note_whether_open,
            rates=self.rates,
        )
        self.workers[peer] = worker
        if hello.role in self._indexed:
            self.prefixes.up(peer, worker.pool_tokens, hello.role)
        self._by_role[hello.role].append(worker)
        self._note_whether_open(worker)
        self._count(worker, 1)
        self._count_backend(hello, 1)
        self._remember(hello.model_name)
        self._index_whole()
        return worker

    def down(self, peer: str) -> Worker | None:
        """Forget a worker and return it; it is no longer `up`."""
        worker = self.workers.pop(peer, None)
        if worker is not None:
            worker.up = False
            self.changes += 1
            self.prefixes.down(peer)
            self.rates.down(peer, worker.hello)
            self._by_role[worker.hello.role].remove(worker)
            self._note_whether_open(worker)
            self._count_backend(worker.hello, -1)
            if not worker.draining:
                self._count(worker, -1)
            if any(other.hello.model_name == worker.hello.model_name for other in self.workers.values()):
                self._remember(worker.hello.model_name)
            self._index_whole()
        return worker

    def drain(self, worker: Worker) -> None:
        """Give the worker nothing new from now on."""
        if not worker.draining:
            worker.draining = True
            self.changes += 1
            self._note_whether_open(worker)
            self._count(worker, -1)
            self._remember(worker.hello.model_name)
            self._index_whole()

    def forget(self, rid: str) -> list[Worker]:
        """Take out what a step that broke off has left of a request at any worker; returns those that had some."""
        had = [worker for worker in self.workers.values() if worker.forget(rid)]
        self._open = {role: OpenWorkers() for role in WORKER_ROLES}
        for worker in self.workers.values():
            self._note_whether_open(worker)
        return had

    def of_role(self, role: Role) -> Sequence[Worker]:
        """The workers of a role, in the order they came."""
        return self._by_role[role]

    def open_to(self, role: Role) -> OpenWorkers[Worker]:
        """Workers of a role that could take something now."""
        return self._open[role]

    @property
    def choices(self) -> int:
        """How many requests were given to workers so far."""
        return self._choices

    @property
    def missing(self) -> list[Role]:
        """Roles of which no worker takes anything new: requests wait for one."""
        needed: Sequence[Role] = ("decode",) if self._whole.total() else WORKER_ROLES
        return [role for role in needed if not self._taking[role]]

    @property
    def serving(self) -> Serving:
        """Who computes prompts now."""
        prefill, decode, extends = self._taking["prefill"], self._taking["decode"], self._whole.total()
        return serving_of(self._local_prefill, prefill=prefill > 0, decode=decode > 0, extends=extends > 0)

    def serves_whole(self, worker: Worker) -> bool:
        """Whether the worker may be given a request with its prompt, to serve it from first to last."""
        return self._local_prefill != "never" and worker.extends

    def any_whole(self, model_name: str) -> bool:
        """Whether a decode worker of the model computes prompts, and does not drain."""
        return self._whole[model_name] > 0

    def paired(self, worker: Worker) -> bool:
        """Whether it can serve: alone, or with a worker of the other role, not draining, that shares its KV format."""
        if self.serves_whole(worker):
            return True
        mine = worker.hello
        other: Role = "decode" if mine.role == "prefill" else "prefill"
        return self._partners[other, mine.model, mine.kv_format] > 0

    def has_reader(self, kv_group: KvGroup, tokens: int, features: frozenset[str]) -> bool:
        """Whether a decode worker of a kv_group, full or not, can hold so many tokens of a request, and does not drain.

        `features` are those of its sampling.
        """
        if self._readers_at != self.changes:
            self._readers_at, self._readers = self.changes, {}
            for worker in self.of_role("decode"):
                if not worker.draining:
                    capacity = inf if worker.capacity is None else worker.capacity
                    self._readers.setdefault(worker.kv_group, set()).add((capacity, worker.features))
        return any(
            tokens <= capacity and features <= known for capacity, known in self._readers.get(kv_group, ())
        )

    def takers(self, role: Role, kv_group: KvGroup) -> int:
        """How many workers of a role and a kv_group do not drain."""
        return self._partners[(role, *kv_group)]

    @property
    def models(self) -> tuple[str, ...]:
        """Names that clients may ask for; another one gets 404. In the order they were first seen."""
        return tuple(self._models)

    def context_len(self, model: str) -> int | None:
        """Tokens of prompt and output together that the largest workers serve; None: not known yet.

        Those that drain count only while there are no others.
        """
        return self._models.get(model)

    @property
    def backends(self) -> frozenset[Backend]:
        """What computes here: equal as long as nothing changes that tokens depend on."""
        return frozenset(self._backends)

    def prompt_len_max(self, model: str) -> int | None:
        """Tokens that the largest worker that computes prompts can hold at once; None: not known."""
        computing = [*self.of_role("prefill"), *filter(self.serves_whole, self.of_role("decode"))]
        capacities = [worker.capacity for worker in computing if worker.hello.model_name == model]
        return max((capacity for capacity in capacities if capacity is not None), default=None)

    def mark_chosen(self, worker: Worker) -> None:
        """A request goes to this worker: ties go to the worker that was chosen longest ago."""
        self._choices += 1
        worker.last_chosen = self._choices

    def _note_whether_open(self, worker: Worker) -> None:
        self._open[worker.hello.role].put(worker, is_open=worker.up and worker.is_open)

    def _count_backend(self, hello: Hello, change: int) -> None:
        self._backends[_backend(hello)] += change
        self._backends = +self._backends
        versions = {(name, model) for name, model, _ in self._backends}
        count = Counter(name for name, _ in versions)
        self.only_versions = {name: model for name, model in versions if count[name] == 1}

    def _count(self, worker: Worker, change: int) -> None:
        hello = worker.hello
        self._taking[hello.role] += change
        if self.serves_whole(worker):
            self._whole[hello.model_name] += change
        partners = (hello.role, hello.model, hello.kv_format)
        self._partners[partners] += change
        if not self._partners[partners]:
            del self._partners[partners]

    def _index_whole(self) -> None:
        """Know the prefixes of decode workers, too, from when they may have to compute prompts."""
        if (self._taking["prefill"] and self._local_prefill == "fallback") or not self._indexed:
            return
        for worker in self.of_role("decode"):
            if worker.peer not in self.prefixes and self.serves_whole(worker):
                self.prefixes.up(worker.peer, worker.pool_tokens, "decode")

    def _remember(self, model: str) -> None:
        mine = [worker for worker in self.workers.values() if worker.hello.model_name == model]
        computing = [w for w in mine if w.hello.role == "prefill" or self.serves_whole(w)]
        prefill = [w.hello.limits.context_len for w in _lasting(computing)]
        decode = [w.capacity or 0 for w in _lasting([w for w in mine if w.hello.role == "decode"])]
        bounds = [most for most in (max(prefill, default=0), max(decode, default=0)) if most]
        self._models[model] = min(bounds) if bounds else None
        serving = {worker.hello.model_name for worker in self.workers.values()} | self._named
        for name in [name for name in self._models if name not in serving]:
            if len(self._models) > MODELS_MAX:
                del self._models[name]


def _lasting(workers: Sequence[Worker]) -> Sequence[Worker]:
    """The workers that do not drain; all, where there are no others: successors are on their way."""
    return [worker for worker in workers if not worker.draining] or workers


def _backend(hello: Hello) -> Backend:
    return (hello.model_name, hello.model, hello.determinism)
