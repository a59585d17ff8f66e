"""How many more tokens of KV the requests of a worker will hold at a time, at most, as they grow and end.

    KV now ──► KV in 16 steps ──► in 32 ──► … : each request one token more a step, or none any more
                      └─ the most of these, less what is held now, is the growth to keep room for

Each request still runs in a number of steps by the share of outputs that come as far (`OutputLengths`). Those that end
give back what they hold, so in a steady state little room is kept, and much when many requests are young. It knows no
pages. The peak of what is held, instead of the sum of all lengths, is the rule of the Past-Future scheduler (Gong et
al., 2025, arXiv:2507.10150).
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.batch.req import Req
from shared.scheduling.output_lengths import OutputLengths

STEPS_AHEAD = tuple(steps << power for power in range(9) for steps in (16, 24))  # 16 … 6,144
ALL_REACH = [1.0] * len(STEPS_AHEAD)
GROUP_LEN = 16  # outputs that differ by fewer tokens are of one age …
GROUPED_FROM = 64  # … from here on: below, the histogram tells shorter lengths apart


class ExpectedGrowth:
    """The growth of some requests by `lengths`, in tokens; by `ratio` alone until these are known.

    Requests of like age and bound are one group.
    """

    def __init__(self, lengths: OutputLengths, steps_certain: int, clip: int, ratio: float):
        self.known = lengths.known
        self._lengths = lengths
        self._steps_certain = steps_certain  # in these all are expected to run on
        self._clip = clip
        self._ratio = ratio
        self._shares: dict[int, list[float]] = {}  # by length of the output
        self._held = [0.0] * len(STEPS_AHEAD)  # KV tokens by then, less those of today
        self._certain = 0  # growth in `steps_certain`
        self._guessed = 0.0  # growth of requests that are longer than all outputs seen

    @property
    def tokens(self) -> float:
        """The most that all together will hold, less what they hold now."""
        return max(self._certain, *self._held) + self._guessed if self.known else self._guessed

    def tokens_with(self, req: Req) -> float:
        """`tokens` if this request came in, too. It is not added."""
        before = list(self._held), self._certain, self._guessed
        self.add([req])
        tokens = self.tokens
        self._held, self._certain, self._guessed = before
        return tokens

    def add(self, reqs: Iterable[Req]) -> None:
        """Expect these, too."""
        if not self.known:
            self._guessed += sum(self._by_ratio(req.remaining_new_tokens) for req in reqs)
            return
        steps_certain = self._steps_certain
        groups: dict[tuple[int, int, bool], list[int]] = {}
        for req in reqs:
            tokens, params = len(req.token_ids), req.params
            output_len = tokens - req.prompt_len
            rest = params.max_new_tokens - output_len
            self._certain += rest if rest < steps_certain else steps_certain
            if output_len >= GROUPED_FROM:
                output_len = output_len // GROUP_LEN * GROUP_LEN + GROUP_LEN // 2
            key = output_len, rest.bit_length(), params.ignore_eos
            group = groups.get(key)
            if group is None:
                group = groups[key] = [0, 0, 0]
            group[0] += 1
            group[1] += rest
            group[2] += tokens - req.cached_len
        for (output_len, _, to_bound), (count, rest, held) in groups.items():
            self._add_group(count, output_len, rest / count, held / count, to_bound=to_bound)

    def _add_group(self, count: int, output_len: int, rest: float, held: float, *, to_bound: bool) -> None:
        """`count` requests that have generated `output_len` tokens, may generate `rest`, and hold `held` each."""
        shares = ALL_REACH if to_bound else self._shares_reaching(output_len)
        if not shares:
            self._guessed += count * self._by_ratio(rest)
            return
        for number, (steps, share) in enumerate(zip(STEPS_AHEAD, shares, strict=True)):
            self._held[number] += count * (((held + steps) * share if steps < rest else 0.0) - held)

    def _shares_reaching(self, output_len: int) -> list[float]:
        """Shares of outputs of at least `output_len` that go on for each of `STEPS_AHEAD`; [] if none came so far."""
        shares = self._shares.get(output_len)
        if shares is None:
            here, reaching = self._lengths.share_reaching(output_len), self._lengths.share_reaching
            shares = [reaching(output_len + steps) / here for steps in STEPS_AHEAD] if here > 0 else []
            self._shares[output_len] = shares
        return shares

    def _by_ratio(self, rest: float) -> float:
        return min(rest, self._clip) * self._ratio
