"""What `segue up` says before any process runs."""

from __future__ import annotations

import errno
import os

import pytest

from shared.errors import ConfigError
from shared.local.role_settings import settings_by_role
from shared.local.up import why_not_ours

FILES = {"router": "", "prefill": "", "decode": ""}


def test_only_a_taken_port_is_called_taken() -> None:
    taken, forbidden = (OSError(number, os.strerror(number)) for number in (errno.EADDRINUSE, errno.EACCES))
    assert why_not_ours(80, taken) == "port 80 is not free on 127.0.0.1; choose another --router-port"
    assert why_not_ours(80, forbidden) == "cannot listen on 127.0.0.1:80: Permission denied"


def test_settings_of_a_role_become_its_flags() -> None:
    settings = settings_by_role(FILES, ["decode.pages=3", "prefill.queue_policy=lpm"], {"SEGUE_SLOTS": "5"})
    assert settings["decode"].flags == ["--pages=3"]
    assert settings["prefill"].flags == ["--queue-policy=lpm"]
    assert settings["router"].flags == []
    assert "slots=5" in repr(settings["decode"].config)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("decode.pagez=3", "unknown setting decode.pagez; did you mean pages or page_size?"),
        ("decode.nonsense=3", "unknown setting decode.nonsense; python -m decode --help lists all"),
        ("router.lease_seconds=3", "unknown setting router.lease_seconds; did you mean"),
        ("decode.pages=many", "decode.pages is not valid: expected `int`, got 'many'"),
        ("prefil.pages=3", "--set takes ROLE.SETTING=VALUE with router, prefill, decode as ROLE"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(entry: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings_by_role(FILES, [entry], {})
    assert str(error.value).startswith(sentence)
