"""Types of bodies are prepared once, however many threads meet them first: msgspec would end the process."""

from __future__ import annotations

import subprocess
import sys

MEET = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Optional, Union
import msgspec
from router.openai.fields.request_body import decode

sys.setswitchinterval(1e-6)
body = b'{"' + b'","'.join(b'f%d":"x","g%d":"y' % (i, i) for i in range(12)) + b'"}'

def text(i):
    short = Annotated[str, msgspec.Meta(max_length=9 + i)]
    return Optional[Union[short, dict[str, Annotated[float, msgspec.Meta(ge=i)]]]]

def meet(kind, all_here):
    all_here.wait()
    decode(body, kind)

with ThreadPoolExecutor(8) as pool:
    for number in range(200):
        fields = [(f"{name}{i}", text(i), None) for i in range(12) for name in "fg"]
        kind, all_here = msgspec.defstruct(f"Kind{number}", fields), threading.Barrier(8)
        list(pool.map(lambda _: meet(kind, all_here), range(8)))
"""


def test_threads_that_meet_a_type_at_once_all_decode_it() -> None:
    ended = subprocess.run([sys.executable, "-c", MEET], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
