"""The file of API keys: what a line says, and which files are refused without a word of what is in them."""

from __future__ import annotations

import pytest

from shared.process.api_keys import KEYS_FILE_BYTES_MAX, ApiKey, digest_of, key_line, new_key, parse_keys

KEY = "sk-segue-test"
DIGEST = digest_of(KEY.encode())
HASH, OTHER = DIGEST.hex(), digest_of(b"other").hex()


def test_a_line_has_a_name_a_hash_and_limits() -> None:
    text = f"# keys\n\nshop {HASH} rpm=60 tpm=100000 concurrent=8 priority=-5 models=a,b\nplain\t{OTHER}\n"
    keys = parse_keys(text.encode())
    assert keys[DIGEST] == ApiKey("shop", DIGEST, 60, 100_000, 8, -5, ("a", "b"))
    assert [key.name for key in keys.values()] == ["shop", "plain"]


def test_what_is_written_for_a_new_key_is_what_is_read() -> None:
    key = new_key()
    assert key.startswith("sk-segue-")
    assert len(key) - len("sk-segue-") == 43  # 256 bits in base64
    assert new_key() != key
    (read,) = parse_keys(key_line("shop", key, "rpm=5  models=m").encode()).values()
    assert (read.name, read.digest, read.rpm, read.models) == ("shop", digest_of(key.encode()), 5, ("m",))


def test_a_key_is_replaced_by_a_second_line_of_its_name() -> None:
    assert [key.name for key in parse_keys(f"a {HASH} rpm=1\na {OTHER} rpm=1".encode()).values()] == [
        "a",
        "a",
    ]
    with pytest.raises(ValueError, match="line 2: line 1 has the same name and other limits"):
        parse_keys(f"a {HASH} rpm=1\na {OTHER} rpm=2".encode())


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("shop", "a name and the SHA-256 hash"),
        (f"shop {KEY}", "this is a key"),
        (f"shop {HASH[:-1]}", "64 hexadecimal digits"),
        (f"9shop {HASH}", "the name must be a letter"),
        (f"{'x' * 64} {HASH}", "the name must be a letter"),
        (f'sh"op {HASH}', "the name must be a letter"),
        (f"shop {HASH} rpm=0", "rpm must be a whole number from 1 on"),
        (f"shop {HASH} tpm=-3", "tpm must be a whole number"),
        (f"shop {HASH} concurrent=many", "concurrent must be a whole number"),
        (f"shop {HASH} rpm=1 rpm=2", "rpm stands there twice"),
        (f"shop {HASH} ttft_target=0", "ttft_target must be seconds above 0"),
        (f"shop {HASH} ttft_target=-2", "ttft_target must be seconds above 0"),
        (f"shop {HASH} ttft_target=nan", "ttft_target must be seconds above 0"),
        (f"shop {HASH} priority=1001", "priority must be a whole number from -1000 to 1000"),
        (f"shop {HASH} models=a,,b", "models must be names"),
        (f"shop {HASH} {KEY}", "after the hash come rpm=, tpm="),
        (f"shop {HASH} admin", "after the hash come rpm=, tpm="),
        (f"other {OTHER}", "line 3: another line has the same hash"),
        ("shop \xff", "is not UTF-8 text"),
    ],
)
def test_a_wrong_line_is_refused_by_number_and_not_repeated(line: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refused:
        parse_keys(f"# first\nother {OTHER}\n{line}".encode("latin-1"))
    assert KEY not in str(refused.value)
    assert HASH not in str(refused.value)


def test_a_file_is_no_larger_than_a_secret() -> None:
    line = f"shop {HASH}\n"
    full = line + "#" * (KEYS_FILE_BYTES_MAX - len(line))
    assert len(parse_keys(full.encode())) == 1
    with pytest.raises(ValueError, match=f"has {KEYS_FILE_BYTES_MAX + 1} bytes"):
        parse_keys(full.encode() + b"#")
