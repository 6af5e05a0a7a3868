"""The sentences of errors. tests/messages.json has them by test, and the tests themselves assert type and key.

``CONTRAFED_WRITE_MESSAGES=1 pytest -n 0 tests`` writes the sentences of all tests, and with a file's name those of its tests.
"""

import json
import os
import re
from contextlib import contextmanager
from pathlib import Path

import pytest

from contrafed.core.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "messages.json"
WRITE = "CONTRAFED_WRITE_MESSAGES"
# What comes before words of Python and other libraries, which differ between versions.
FOREIGN = r"((?<!Return)(?<!Name)(?<!Type)Error: |cannot read \S+ \(|npz file: |with images: |Errno ).*"


def read_messages():
    return json.loads(FILE.read_text(encoding="utf-8"))


def write_messages(messages):
    FILE.write_text(json.dumps(messages, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def normalise(text, folder):
    """Replace what differs between machines and days: folders, lines of code, and lists of choices that grow."""
    for path, name in ((folder, "TMP"), (ROOT, "ROOT"), (Path.home(), "HOME")):
        text = text.replace(str(path), name)
    text = re.sub(r"/\S*/pytest-\d+/[\w-]+", "TMP", text)
    text = re.sub(FOREIGN, r"\1...", text)
    text = re.sub(r"choices: ([^,]+,){6}[^;]*", "choices: ...", text)
    return re.sub(r"line \d+", "line N", text)


class Refused:
    """Expects errors of one line in one test, with their type and key, and compares their sentences."""

    def __init__(self, test, folder):
        self.test, self.folder, self.count = test.removeprefix("tests/"), folder, 0

    @contextmanager
    def __call__(self, key=None, kind=UserError):
        with pytest.raises(kind) as found:
            yield found
        if key is not None:
            assert found.value.key == key, str(found.value)
        self.check(str(found.value))

    def check(self, text):
        """Compare a sentence with the one that tests/messages.json has at this place of the test."""
        text, name = normalise(text.rstrip("\n"), self.folder), self.test + (f" {self.count}" if self.count else "")
        self.count += 1
        assert "\n" not in text
        messages = read_messages()
        if os.environ.get(WRITE):
            write_messages(messages | {name: text})
        else:
            assert text == messages.get(name), f"a new sentence: {WRITE}=1 pytest -n 0 'tests/{self.test}' writes it"
