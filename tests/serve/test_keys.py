"""API keys are read with care and told apart by name alone."""

from __future__ import annotations

import pytest

from dflash_trt.errors import UserError
from dflash_trt.serve.keys import VARIABLE, Keys


def write(path, content: bytes, mode: int = 0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_key_a_line_and_comments(tmp_path):
    keys = Keys.read(write(tmp_path / "keys", b"# mine\nalpha\n\n  beta  \r\n#gamma\nalpha#1\n", 0o640))
    assert [keys.name(key) for key in (b"alpha", b"beta", b"alpha#1")] == ["key 1", "key 2", "key 3"]
    for wrong in (b"", b"alph", b"alphaa", b"Alpha", b"gamma", b"# mine", b"\xff\x00", b"alpha\n"):
        assert keys.name(wrong) is None
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (b"alpha", 0o644, "every user may read the API keys"),
        (b"alpha", 0o604, "chmod o-r"),
        (b"# nothing\n\n", 0o600, "there is no API key"),
        (b"", 0o600, "there is no API key"),
        (b"alpha\nse cret", 0o600, "key 2 has characters"),
        ("schlüssel".encode(), 0o600, "key 1 has characters"),
        (b"se\x01cret", 0o600, "key 1 has characters"),
        (b"\xff\xfe", 0o600, "not text"),
    ],
)
def test_a_file_that_will_not_do_is_refused_without_showing_keys(tmp_path, content, mode, words):
    with pytest.raises(UserError, match=words) as caught:
        Keys.read(write(tmp_path / "keys", content, mode))
    assert "alpha" not in str(caught.value) and "cret" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    for path in (tmp_path / "keys", tmp_path):
        with pytest.raises(UserError, match="cannot read the API keys"):
            Keys.read(path)


def test_the_environment_may_hold_keys(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Keys.from_environment() is None
    monkeypatch.setenv(VARIABLE, "alpha, beta,")
    keys = Keys.from_environment()
    assert keys and [keys.name(key) for key in (b"alpha", b"beta", b"")] == ["key 1", "key 2", None]
    for empty in ("", " , "):
        monkeypatch.setenv(VARIABLE, empty)
        with pytest.raises(UserError, match=VARIABLE):  # somebody meant to lock the door
            Keys.from_environment()


def test_keys_cannot_be_found_in_the_object():
    keys = Keys(["alpha-0123456789"])
    assert "alpha-0123456789" not in repr(vars(keys))
