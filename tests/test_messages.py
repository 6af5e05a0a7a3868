"""The file of sentences, which tests/messages.py compares errors with."""

import re

from messages import ROOT, read_messages


def test_every_sentence_is_one_short_line_of_a_test_that_there_is():
    tests = {
        f"{path.relative_to(ROOT / 'tests').as_posix()}::{name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"(?m)^def (\w+)", path.read_text(encoding="utf-8"))
    }
    messages = read_messages()
    assert {name.partition("[")[0].partition(" ")[0] for name in messages} <= tests
    assert all(text and "\n" not in text and len(text) < 1000 for text in messages.values())
