"""instructor: models of pydantic by tools, by JSON schema and by JSON mode; one of them streamed."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, Field
from told import BASE_URL, KEY, MODEL, Sums

ASKED: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Oslo has 12 degrees Celsius."}],
    "max_tokens": 200,
    "seed": 3,
    "max_retries": 0,
}


class CityReport(BaseModel):
    city: str = Field(max_length=24)
    unit: Literal["celsius", "fahrenheit"]
    degrees: int = Field(ge=-50, le=50)


def main() -> None:
    told = Sums()
    with openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0) as plain:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
            client: Any = instructor.from_openai(plain, mode=mode)
            report, raw = client.chat.completions.create_with_completion(response_model=CityReport, **ASKED)
            assert isinstance(report, CityReport)
            told.add(raw.usage.completion_tokens)
        parts = list(client.chat.completions.create_partial(response_model=CityReport, **ASKED))
        assert parts[-1].unit in ("celsius", "fahrenheit"), parts[-1]
        told.answers += 1
    told.write()


main()
