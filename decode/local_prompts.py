"""Requests whose tokens are computed here, beside the streams that decode: prompts, and retracted requests.

    start ─► extending: a chunk in each step, as many tokens as its time has room for ─► all computed: it joins

A router serves a prompt here (`Serve`), and a retracted request is computed again where host memory had no room for it.
A request has the pages of all its tokens when it starts, so it never waits for a page. The last row of a prompt samples
its first token; the rows of one that is computed again sample nothing, since its tokens are known. Then it joins as one
whose pages have arrived. Rows that decode get their next token within `itl_target_seconds`.

Requests are computed in the order in which they started, but for short ones: a step that cuts a request saves
`SHORT_SHARE` of its tokens for those behind, and one that fits what was saved goes first. One whose next page another
computes waits until that one is done, and takes what they share from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decode.counters import DecodeCounters
from shared.batch.req import Req
from shared.batch.schedule_batch import ExtendRow, ScheduleBatch, SlotJoin
from shared.kv.kv_memory import KvMemory
from shared.scheduling.chunk_budget import chunk_tokens
from shared.scheduling.prefill_adder import Extend
from shared.scheduling.step_cost import ExtendRate, StepCost

# How many times the target a step may take beside which nobody decodes: somebody may join meanwhile.
ALONE = 4
# … and at least so many times what the smallest pass takes: else, where that takes longer, each page would pay for one.
LEAST_PASSES = 2
# Where rows that decode meet the target and no pass fits beside them, one in so many steps has one: of the tokens of a
# stream 97 % come in time. It may take so many times the target.
SPARSE_STEPS, SPARSE_SECONDS = 40, 2
# Where they miss it by themselves each step has one, whose tokens take so many times what the rows take.
LATE_SHARE = 1

# Of the tokens of each step that cuts a request: saved for shorter ones behind it. As `short_share` of prefill workers.
SHORT_SHARE = 0.25


@dataclass(slots=True, eq=False)
class Prompt:
    """A request that is computed here."""

    req: Req
    samples: bool  # its first token is not known; otherwise it is computed again
    seconds: float = 0.0  # of the device for it
    awaited: Prompt | None = None  # computes a prefix that both have
    awaited_len: int = 0  # tokens of that prefix, in whole pages

    @property
    def end(self) -> int:
        """Tokens to compute."""
        return len(self.req.token_ids) - (not self.samples)

    @property
    def reusable_len(self) -> int:
        """Tokens that may come from the cache; at least one is computed."""
        return self.req.reusable_len if self.samples else self.end - 1

    @property
    def begun(self) -> bool:
        """Whether a step was planned that computes some of it."""
        return self.req.launched_len > self.req.cached_len


@dataclass(frozen=True, slots=True)
class Settled:
    """A row of a step that has settled, whose request is still computed here, or has just been."""

    prompt: Prompt
    start: int  # of its first token
    place: int  # among the prompts of the batch
    row: int | None  # of what was sampled; None: it samples nothing
    last: bool  # all of the request is computed


@dataclass(slots=True)
class LocalPrompts:
    """The requests that are being computed here, and their rows in the steps that have not settled."""

    memory: KvMemory
    counters: DecodeCounters
    tokens_max: int  # of a step; 0: this worker computes no tokens of prompts
    itl_target_seconds: float
    cost: StepCost = field(default_factory=StepCost)
    _prompts: dict[Req, Prompt] = field(default_factory=dict)  # in the order of their start
    # By step, with the seconds that it may take.
    _planned: dict[int, tuple[list[tuple[Prompt, Extend]], float]] = field(default_factory=dict)
    # Rows of which a step alone was planned, to see what it costs.
    _asked: set[int] = field(default_factory=set)
    _saved: float = 0.0  # tokens of steps that cut a request, for shorter ones behind it
    _without: int = 0  # steps since the last one that computed some of a prompt
    _tried: int = 0  # tokens that a step may take whatever the fit says: half as many took half its time

    @property
    def enabled(self) -> bool:
        """Whether this worker computes tokens of prompts at all."""
        return self.tokens_max > 0

    @property
    def extending(self) -> list[Req]:
        """All requests that are computed here, in the order in which they started."""
        return list(self._prompts)

    @property
    def in_order(self) -> list[Prompt]:
        """What is computed here, in the order of their start."""
        return list(self._prompts.values())

    @property
    def served(self) -> list[Req]:
        """Requests whose first token is not known."""
        return [req for req, prompt in self._prompts.items() if prompt.samples] if self._prompts else []

    @property
    def recomputed(self) -> list[Req]:
        """Requests that were retracted and are computed again."""
        return [req for req, prompt in self._prompts.items() if not prompt.samples] if self._prompts else []

    @property
    def tokens_left(self) -> int:
        """Tokens that no step in flight computes, without those that requests take from others."""
        return sum(each.end - max(each.req.launched_len, each.awaited_len) for each in self._prompts.values())

    def rate(self, decode_rows: int) -> ExtendRate:
        """How fast prompts are computed here beside so many rows that decode."""
        if not self.enabled:
            return ExtendRate()
        tokens = self._fitting(decode_rows, self._bound_seconds(decode_rows))
        return self.cost.extend_rate(decode_rows, tokens, self._steps_each(decode_rows))

    def start(self, req: Req, *, samples: bool) -> None:
        """Compute the request from its first token on that is not cached; it has the pages of all its tokens."""
        req.kv_len = req.launched_len = req.cached_len
        self._prompts[req] = prompt = Prompt(req, samples)
        if samples:
            self.counters.local_prompts += 1
            self.counters.cached_tokens += req.cached_len
        else:
            self.counters.recomputed += 1
        self._look_for_awaited(prompt)
        self.counters.waited_for_prompt += prompt.awaited is not None

    def leave(self, req: Req) -> None:
        """Stop: the request has ended. It may still have a row in the step in flight."""
        self._prompts.pop(req, None)  # one whose last row has settled has left already

    def plan(self, step: int, decode_rows: int) -> tuple[tuple[SlotJoin, ...], tuple[ExtendRow, ...]]:
        """What this step computes of them beside so many rows that decode: the joins and the rows."""
        if not self._prompts or self._asks_first(decode_rows):
            return (), ()
        if self._without < self._steps_each(decode_rows) - 1:
            self._without += 1
            return (), ()
        if self._without:
            self.cost.least.doubt()
        extends = self._chunks(decode_rows)
        if not extends:
            return (), ()  # all wait for what the step in flight computes
        self._without = 0
        joins, rows = list[SlotJoin](), list[ExtendRow]()
        for req, start, end in ((each.req, each.start, each.end) for each in extends):
            assert req.slot is not None
            if start == req.cached_len:
                joins.append(req.join())
            samples = self._prompts[req].samples and end == self._prompts[req].end
            scores = req.scores(start, end) if self._prompts[req].samples else ()
            rows.append(ExtendRow(req.slot, req.token_ids[start:end], start, samples, scores))
            req.launched_len = end
        planned = [(self._prompts[each.req], each) for each in extends]
        self._planned[step] = planned, self._bound_seconds(decode_rows)
        self.counters.extend_tokens += sum(each.end - each.start for each in extends)
        return tuple(joins), tuple(rows)

    def settle(self, batch: ScheduleBatch, seconds: float) -> list[Settled]:
        """Learn what the step cost; returns its rows, in their order. Requests of which all is computed leave."""
        (planned, bound), rows = self._planned.pop(batch.step, ([], 0.0)), len(batch.decode_slots)
        if not planned:
            self.cost.observe_decode(rows, seconds)
            return []
        self.cost.observe_extend(rows, [(each.start, each.end - each.start) for _, each in planned], seconds)
        beyond = max(0.0, seconds - self.cost.decode_seconds(rows))
        tokens = sum(each.end - each.start for _, each in planned)
        room = bound - self.cost.decode_seconds(rows)
        self._tried = 2 * tokens if seconds > 0 and beyond <= room / 2 else 0
        settled, row = list[Settled](), rows
        for place, (prompt, each) in enumerate(planned):
            samples = batch.extend[place].samples
            if self._prompts.get(each.req) is prompt:  # it has not ended while the step ran
                each.req.kv_len = each.end
                prompt.seconds += beyond * (each.end - each.start) / tokens
                settled.append(Settled(prompt, each.start, place, row if samples else None, each.last))
            row += samples
        for done in [each.prompt.req for each in settled if each.last]:
            del self._prompts[done]
            self.memory.commit_and_dedupe(done)  # the slot's next join names the pages anew
        return settled

    def _look_for_awaited(self, prompt: Prompt) -> None:
        """Find who computes the next page of a request that has not begun: of those that started before it, if any."""
        req, page_size = prompt.req, self.memory.page_size
        prompt.awaited, prompt.awaited_len = None, 0
        start, end = req.cached_len, req.cached_len + page_size
        if end > prompt.reusable_len:
            return
        for other in self._prompts.values():
            if other is prompt:
                return
            if end <= other.end and req.begins_like(other.req, start, end):
                most = min(prompt.reusable_len, other.end)
                while (
                    end + page_size <= most
                    and req.token_ids[end : end + page_size] == other.req.token_ids[end : end + page_size]
                ):
                    end += page_size
                prompt.awaited, prompt.awaited_len = other, end
                return

    def _waits(self, prompt: Prompt) -> bool:
        """Whether another one computes the next page of the request.

        A request that has waited takes what is cached by now.
        """
        if prompt.begun:
            return False
        if prompt.awaited is not None:
            if self._prompts.get(prompt.awaited.req) is prompt.awaited:
                return True
            self._take_cached(prompt)
            self._look_for_awaited(prompt)
        return prompt.awaited is not None

    def _take_cached(self, prompt: Prompt) -> None:
        req = prompt.req
        gained = self.memory.rematch(req, prompt.reusable_len)
        req.kv_len = req.launched_len = req.cached_len
        self.counters.cached_tokens += gained * prompt.samples

    def _asks_first(self, decode_rows: int) -> bool:
        """Whether this step shows what so many rows cost alone: once for each number of them that was not seen yet."""
        if not decode_rows or decode_rows in self._asked or self.cost.knows_decode(decode_rows):
            return False
        self._asked.add(decode_rows)
        return True

    def _chunks(self, decode_rows: int) -> list[Extend]:
        """The next tokens of each in turn, until the step's tokens or its time are used up."""
        bound, left = self._bound_seconds(decode_rows), self.tokens_max
        chunks, masked, of_short = list[Extend](), False, 0
        short, others = self._in_turn()
        for prompt in [*short, *others]:
            req, start, all_tokens = prompt.req, prompt.req.launched_len, prompt.end
            count = chunk_tokens(
                self.cost,
                rows=decode_rows,
                position=start,
                bound_seconds=bound,
                page_size=self.memory.page_size,
                tokens_max=left,
            )
            end = min(start + max(count, self._tried_from(start, left)), all_tokens)
            needs_mask = end == all_tokens and prompt.samples and req.params.grammar is not None
            if needs_mask and masked and decode_rows:
                break  # the mask of a first token takes what it takes: one a step, for streams wait for it
            masked |= needs_mask
            chunks.append(Extend(req, start, end, last=end == all_tokens))
            of_short += (end - start) * (prompt in short)
            if end < all_tokens or self.cost.extend is None:
                break
            left -= end - start
            bound -= self.cost.extend.seconds(start, end - start)
            if left < self.memory.page_size or bound <= self.cost.decode_seconds(decode_rows):
                break
        self._saved -= of_short
        if chunks and not chunks[-1].last:
            self._saved += SHORT_SHARE * sum(each.end - each.start for each in chunks)
            self._saved = min(self._saved, self.tokens_max)
        return chunks

    def _in_turn(self) -> tuple[list[Prompt], list[Prompt]]:
        """Requests with tokens that no step in flight computes: short ones that go first, and the others in order."""
        short, others = list[Prompt](), list[Prompt]()
        saved, first_tokens = self._saved, 0
        for prompt in self._prompts.values():
            if self._waits(prompt):
                continue
            tokens = prompt.end - prompt.req.launched_len
            if not tokens:
                continue  # its last row is in flight
            if tokens <= saved and tokens < first_tokens:
                short.append(prompt)
                saved -= tokens
            else:
                others.append(prompt)
                first_tokens = first_tokens or tokens
        return short, others

    def _tried_from(self, start: int, left: int) -> int:
        """Tokens up to the end of a page; steps of one page alone do not tell what a pass costs and what a token."""
        page_size = self.memory.page_size
        return (start + min(self._tried, left)) // page_size * page_size - start

    def _steps_each(self, decode_rows: int) -> int:
        """One in so many steps beside so many rows has a pass."""
        return 1 if self._fits_each(decode_rows) or self._are_late(decode_rows) else SPARSE_STEPS

    def _are_late(self, decode_rows: int) -> bool:
        """Whether so many rows miss the target by themselves."""
        return self.cost.decode_seconds(decode_rows) >= self.itl_target_seconds

    def _fits_each(self, decode_rows: int) -> bool:
        """Whether each step beside so many rows has time for a pass, however small."""
        left = self.itl_target_seconds - self.cost.decode_seconds(decode_rows)
        return not decode_rows or left >= self.cost.least.of(
            self._fitting(decode_rows, self.itl_target_seconds)
        )

    def _fitting(self, decode_rows: int, bound_seconds: float) -> int:
        """Tokens of a prompt, from its first on, that the fit says a step of so many seconds can take."""
        return chunk_tokens(
            self.cost,
            rows=decode_rows,
            position=0,
            bound_seconds=bound_seconds,
            page_size=self.memory.page_size,
            tokens_max=self.tokens_max,
        )

    def _bound_seconds(self, decode_rows: int) -> float:
        """What a step may take that computes some of a prompt."""
        if not decode_rows:
            return max(ALONE * self.itl_target_seconds, LEAST_PASSES * self.cost.least.of(0))
        if self._fits_each(decode_rows):
            return self.itl_target_seconds
        if self._are_late(decode_rows):
            fixed = self.cost.extend.fixed if self.cost.extend is not None else 0.0
            return fixed + (1 + LATE_SHARE) * self.cost.decode_seconds(decode_rows)
        return SPARSE_SECONDS * self.itl_target_seconds
