"""`StepKernels` in plain torch, on any device: what `step_kernels.cu` means, and what it is compared with.

Shapes depend on no value, so a graph may capture it. A row that is drawn costs a hash for each token of the vocabulary
in int64, several times over: right for tests and rehearsals, too slow to serve with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.engine.cuda.step_kernels import ReportWord, SlotWord
from shared.engine.sampling.gumbel import gumbel_noise, row_keys
from shared.wire.sampled import TOP_LOGPROBS_MAX


class ReferenceKernels:
    """See `StepKernels`."""

    def write_words(self, entries: Tensor, words: Tensor) -> None:
        """See `StepKernels`."""
        words.index_copy_(0, entries[:, 0].long(), entries[:, 1])

    def prepare_decode(
        self,
        slots: Tensor,
        kv_indptr: Tensor,
        page_tables: Tensor,
        state: Tensor,
        page_size: int,
        token_ids: Tensor,
        positions: Tensor,
        kv_last_page_len: Tensor,
        kv_indices: Tensor,
    ) -> None:
        """See `StepKernels`. Entries of `kv_indices` behind the last row's stay as they are."""
        at = slots.long()
        real = slots != len(state) - 1
        kv_lens = state[at, SlotWord.KV_LEN]
        token_ids.copy_(state[at, SlotWord.LAST_TOKEN])
        positions.copy_(kv_lens * real)
        kv_last_page_len.copy_(positions % page_size + 1)
        state[:, SlotWord.KV_LEN].index_copy_(0, at, kv_lens + real.int())
        entries = torch.arange(len(kv_indices), dtype=torch.int32, device=kv_indices.device)
        rows = torch.searchsorted(kv_indptr[1:], entries, right=True).clamp_(max=len(slots) - 1)
        places = (entries - kv_indptr[rows]).clamp_(max=page_tables.shape[1] - 1)
        pages = page_tables[at[rows], places.long()]
        kv_indices.copy_(torch.where(entries < kv_indptr[-1], pages, kv_indices))

    def choose_tokens(self, logits: Tensor, slots: Tensor, state: Tensor, tokens: Tensor) -> None:
        """See `StepKernels`."""
        at = slots.long()
        own = state[at]  # [rows, STATE_WORDS]
        logits = torch.where(logits.isnan(), -torch.inf, logits)
        temperature = own[:, SlotWord.TEMPERATURE].view(torch.float32).unsqueeze(1)
        # Read as unsigned, the lower word is added to the upper one; the sum of both is the seed.
        seeds = (own[:, SlotWord.SEED].long() & 0xFFFFFFFF) + (own[:, SlotWord.SEED + 1].long() << 32)
        keys = row_keys(seeds, (own[:, SlotWord.KV_LEN] - own[:, SlotWord.PROMPT_LEN]).long())
        noise = gumbel_noise(keys.unsqueeze(1), torch.arange(logits.shape[1], device=logits.device))
        drawn = (logits - logits.amax(-1, keepdim=True)) / temperature + noise
        drawn = torch.where(drawn.isnan(), -torch.inf, drawn)
        tokens.copy_(torch.where(temperature > 0, drawn, logits).argmax(-1))
        real = slots != len(state) - 1
        state[:, SlotWord.LAST_TOKEN].index_copy_(
            0, at, torch.where(real, tokens, own[:, SlotWord.LAST_TOKEN])
        )

    def logprobs(
        self, logits: Tensor, rows: Tensor, token_ids: Tensor, tops: Tensor, reports: Tensor
    ) -> None:
        """See `StepKernels`. One by one, because torch adds up a row of many in another order."""
        del tops  # all are reported
        for at in range(len(rows)):
            found = logits.index_select(0, rows[at : at + 1])[0].double()
            found = torch.where(found.isnan(), -torch.inf, found)
            chosen = found.index_select(0, token_ids[at : at + 1])
            total = found.amax() + (found - found.amax()).exp().sum().log()
            values, ids = found.sort(descending=True, stable=True)
            count = min(TOP_LOGPROBS_MAX, len(ids))
            own = reports[at]
            own[ReportWord.LOGPROB : ReportWord.RANK].copy_((chosen - total).view(torch.int32))
            own[ReportWord.RANK : ReportWord.RANK + 1].copy_((found > chosen).sum() + 1)
            own[ReportWord.TOP_IDS : ReportWord.TOP_IDS + count].copy_(ids[:count])
            top = own[ReportWord.TOP_LOGPROBS : ReportWord.TOP_LOGPROBS + 2 * count]
            top.copy_((values[:count] - total).view(torch.int32))
