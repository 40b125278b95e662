"""Configurations of every kind that is read, each with what lies beside it, and the judge of broken ones made of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from planner.errors import InputError
from planner.frameworks.config import Config
from planner.frameworks.reading import read_config
from planner.request import Request
from planner.verdict import findings, planned

FOLDER = Path(__file__).with_name("data")
GPUS = 16
LONGEST_MESSAGE = 400

Tree = dict[str, Any]
Place = tuple[Any, ...]


@dataclass(frozen=True)
class Good:
    """A file that is read, as text and, where it is data, as a tree."""

    path: Path
    text: str
    tree: Tree | None
    beside: tuple[Path, ...]

    @property
    def ending(self) -> str:
        """The file's ending with its dot."""
        return self.path.suffix

    def write(self, text: str) -> Path:
        """The file, changed, in the current folder with what lies beside it."""
        for other in self.beside:
            Path(other.name).write_text(other.read_text())
        path = Path(self.path.name)
        path.write_text(text)
        return path

    def dumped(self, tree: Tree) -> str:
        """A tree as text of this file's format."""
        return json.dumps(tree) if self.ending == ".json" else yaml.safe_dump(tree)


def _good(folder: Path) -> Good:
    """The file of a folder: a script before what it names."""
    path, *beside = sorted(folder.iterdir(), key=lambda path: path.suffix != ".sh")
    text = path.read_text()
    return Good(path, text, yaml.safe_load(text) if path.suffix in (".yaml", ".yml", ".json") else None, tuple(beside))


LOG = FOLDER / "logs" / "megatron.log"
GOOD: dict[str, Good] = {folder.name: _good(folder) for folder in sorted((FOLDER / "good").iterdir())}
GOOD["megatron_log"] = Good(LOG, LOG.read_text(), None, ())
TREES = {kind: good for kind, good in GOOD.items() if good.tree is not None}
TEXTS = {kind: good for kind, good in GOOD.items() if good.tree is None}
SCRIPTS = {kind: good for kind, good in GOOD.items() if good.ending == ".sh"}


@dataclass(frozen=True)
class Told:
    """What became of a file."""

    config: Config | None
    message: str = ""
    findings: tuple[str, ...] = ()

    def noted(self, word: str) -> bool:
        """Whether the error, the notes or a finding mention a word."""
        lines = (self.message, *self.findings, *(self.config.assumed + self.config.ignored if self.config else ()))
        return any(word.replace("_", "-") in line.replace("_", "-") for line in lines)


def judged(path: Path, num_gpus: int | None = GPUS) -> Told:
    """Reads a file, plans it and looks for what its settings break; what is not an InputError of one line, or short lines, fails."""
    try:
        config = read_config(path, num_gpus)
    except InputError as error:
        check_message(str(error))
        return Told(None, str(error))
    assert isinstance(config, Config)
    for line in (*config.read, *config.assumed, *config.ignored):
        assert isinstance(line, str) and "\n" not in line and len(line) < 2 * LONGEST_MESSAGE, line[:1000]
    try:
        own = planned(config, Request(num_gpus=num_gpus, model=None if config.request.model else "llama-3-8b"))
        found = findings(own)
    except InputError as error:
        check_message(str(error))
        return Told(config, str(error))
    for finding in found:
        assert "\n" not in finding.text and len(finding.text) < LONGEST_MESSAGE, finding.text[:1000]
    return Told(config, findings=tuple(f"{finding.rule}: {finding.text}" for finding in found))


def check_message(message: str) -> None:
    """An error is one line that a person reads."""
    assert message and "\n" not in message and "\r" not in message and len(message) < LONGEST_MESSAGE, message[:1000]
