"""What a program tells the test that runs it: how many answers it had, and the tokens that their usage named.

Programs lie beside this file and run in the environment of their client. They take nothing from Segue.
"""

from __future__ import annotations

import json
import os
import sys

BASE_URL = os.environ["SEGUE_BASE_URL"]  # with /v1
MODEL = "smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # by which it is known too
KEY = "any"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}


class Sums:
    """Sums over the answers of one program."""

    def __init__(self) -> None:
        self.answers = 0
        self.completion_tokens = 0

    def add(self, completion_tokens: int) -> None:
        """One answer, with at least one token."""
        assert completion_tokens > 0, completion_tokens
        self.answers += 1
        self.completion_tokens += completion_tokens

    def write(self) -> None:
        """The last line of a program that came to its end."""
        sys.stdout.write(json.dumps({"answers": self.answers, "completion_tokens": self.completion_tokens}))
        sys.stdout.write("\n")


def check_weather(arguments: str | dict[str, object]) -> None:
    """The arguments of a call are what `WEATHER` wants."""
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(read) == {"city", "unit"}, read
    assert isinstance(read["city"], str), read
    assert read["unit"] in ("celsius", "fahrenheit"), read
