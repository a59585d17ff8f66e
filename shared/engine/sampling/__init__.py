"""From logits to tokens: adjustments, grammars and their masks, noise, logprobs."""
