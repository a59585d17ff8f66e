"""What steps are told through, alike on each rank: the words of slots, and the ring of staging."""

from __future__ import annotations

import torch

from shared.engine.cuda.engine_parts import Capacity, EngineParts
from shared.engine.cuda.extend_graphs import static_words
from shared.engine.cuda.graphs import DecodeGraphs
from shared.engine.cuda.slots import ENTRY_WORDS, DeviceWords
from shared.engine.cuda.staging import Staging
from shared.wire.sampling_params import MAX_LOGIT_BIAS_ENTRIES, MAX_STOP_TOKEN_IDS

_ROW_WORDS = 64 + 3 * (MAX_LOGIT_BIAS_ENTRIES + MAX_STOP_TOKEN_IDS)  # of staging for the sampling of a row


def step_memory(parts: EngineParts, capacity: Capacity) -> tuple[DeviceWords, Staging]:
    """Zeroed, for a device of this capacity."""
    cache, slots, width = parts.cache, capacity.slots, capacity.pages_per_slot
    device = cache.store.device
    words = DeviceWords(slots, width, cache.page_size, len(cache.store) - 1, device)
    fixed = DecodeGraphs.fixed_words(slots)
    # An EXTEND's arrays: three by token, a few by request, and the tables.
    of_extend = static_words(capacity.extend_tokens, slots * (width + _ROW_WORDS))
    buffer = torch.zeros(fixed + of_extend + ENTRY_WORDS, dtype=torch.int32, device=device)
    return words, Staging(parts.forward, buffer, fixed, capacity.staging_buffers)
