"""Text to tokens and back: the tokenizer with its chat template, and the incremental detokenizer."""
