"""Prompts of an exact number of tokens, out of words that are one token each, alone and after a space.

That holds for the vocabulary of SmolLM2 (a test asks its tokenizer); another model may count differently, which the
report then shows, for it tells the server's own count. Prompts are drawn from a seed: the same seed gives the same
prompts, another seed shares nothing with them that a prefix cache could use.
"""

from __future__ import annotations

import random

_TEXT = """
able after again air all animal apple area arm art back ball band bank base bear bed best big bird blue boat body
book box bread bridge brother build car care cat center chair child church city class clear cloud coast cold color
common cook corn cost country course cross cup dark day deep dog door down dream drive dry early earth east edge
egg energy engine even eye face fair farm fast father field fire fish flat floor flower food foot forest form free
fresh friend front fruit gate glass gold good grass great green ground group hair half hall hand hard head heart
heat high hill history home horse hot house ice iron jump key king lake land language large late law leaf left
letter level life light line lion list long low main map mark market metal milk mind month moon mother mouth music
name nature near neck new night north note number ocean office oil old open orange paper park part path people
picture place plain plan plant play point pool power press price question quick rain red rice rich right ring river
road rock room root round rule salt sand school sea season second seed ship shirt short side skin sky sleep
small snow soft song south space spring square star station stone street strong summer sun table tall teacher test
time town train tree turn under voice walk wall war warm watch water wave way weather week west wheel white wide
wild wind window winter wood word work world yard year yellow young
"""

WORDS = tuple(_TEXT.split())


class DrawnPrompts:
    """A source of prompts; one for each run of a scenario."""

    def __init__(self, seed: str):
        self._random = random.Random(seed)

    def draw(self, tokens: int, prefix: str = "") -> str:
        """A prompt of this many tokens, after those of `prefix`, which was drawn here too."""
        text = " ".join(self._random.choices(WORDS, k=tokens))
        return f"{prefix} {text}" if prefix else text
