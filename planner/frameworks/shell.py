"""The words of the command that a shell script launches, its variables filled in. The script is read, never run."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from planner.frameworks.files import Source

LAUNCHERS = ("torchrun", "python", "python3", "accelerate", "deepspeed", "srun", "mpirun", "exec")
"""Words that begin a launch; a script may also begin it by a variable."""
PROGRAM = re.compile(r"\.py$|^torchtitan\.train$|^-m$|^--config-file(=|$)")
"""Words of a launch: a program, or the flag of one that only a variable names."""
TEST = re.compile(r"^(?:\[\[?|test)\s")
MOST_WORDS = 20_000
MOST_LETTERS = 1 << 16
"""Of a variable or a line."""
MOST_DEPTH = 40
"""Beyond these a script unfolds without end."""

ASSIGNMENT = re.compile(r"^(?:export\s+|declare\s+(?:-\w+\s+)*|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
REFERENCE = re.compile(
    r"\$\{(?P<braced>[A-Za-z_]\w*)(?:\[[@*]\])?(?P<default>:?[-=?+][^{}]*)?\}"
    r"|\$(?P<plain>[A-Za-z_]\w*)"
    r"|\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)"
    r"|\$\((?P<command>[^()]*(?:\([^()]*\)[^()]*)*)\)"
    r"|`(?P<ticks>[^`]*)`"
    r"|\$(?P<special>[@*#?!0-9])"
    r"|\$\{(?P<other>[^}]*)\}"
)


@dataclass(frozen=True)
class Script:
    """What a launch script says."""

    words: tuple[str, ...]
    """The launched command and its arguments, quotes removed, arrays and variables filled in: torchrun ... pretrain_gpt.py --flag value."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script exports or sets for the command."""
    unknown: tuple[str, ...] = ()
    """Variables and substitutions whose values only the shell would know, as written: "$NODE_RANK"."""
    notes: tuple[str, ...] = ()
    """What was taken for granted, a line each: conditions that only the shell could decide."""


MOST_BYTES = 1 << 18


def read_script(source: Source) -> Script:
    """The script of a file. Raises InputError for one without a command, or with an unbalanced quote."""
    if len(source.text) > MOST_BYTES:
        raise source.fail(f"larger than {MOST_BYTES >> 10} KiB, so not a launch script")
    reader = _Reader(source)
    for line in logical_lines(source.text):
        for joint, statement in statements(line):
            reader.take(joint, statement)
    if reader.launched is None:
        raise source.fail("no command that launches a training program (such as torchrun ... pretrain_gpt.py) was found")
    return Script(
        tuple(reader.launched), dict(reader.environment), tuple(dict.fromkeys(reader.unknown)), tuple(dict.fromkeys(reader.notes))
    )


def logical_lines(text: str) -> Iterator[str]:
    r"""Lines without comments; what a backslash, an open quote or an open bracket of an array continues is joined.

    >>> list(logical_lines("A=(1 # one\n 2)\nrun \\\n --x 3 # tail"))
    ['A=(1   2)', 'run   --x 3']
    """
    held: list[str] = []
    quote, depth, place = "", 0, 0
    text = text.replace("\r\n", "\n")
    while place < len(text):
        letter = text[place]
        before = text[place - 1] if place else "\n"
        if letter == "\\" and quote != "'":
            held.append(" " if text[place + 1 : place + 2] == "\n" else text[place : place + 2])
            place += 1
        elif letter == "#" and not quote and before in " \t\n;(":
            end = text.find("\n", place)
            place = (len(text) if end < 0 else end) - 1
        elif letter == "\n" and not quote:
            if depth:
                held.append(" ")
            else:
                yield "".join(held).strip()
                held.clear()
        else:
            held.append(letter)
            quote = _next_quote(quote, letter)
            depth += _bracket(letter, before, depth) if not quote else 0
        place += 1
    yield "".join(held).strip()


def statements(line: str) -> Iterator[tuple[str, str]]:
    """The statements of a logical line, each with the joint before it: "", ";", "&&" or "||".

    >>> list(statements("A=1; [ $A = 1 ] && B=2"))
    [('', 'A=1'), (';', '[ $A = 1 ]'), ('&&', 'B=2')]
    >>> list(statements("A='x;y' B=$(a | b; c)"))
    [('', "A='x;y' B=$(a | b; c)")]
    """
    joint, start, quote, depth, place = "", 0, "", 0, 0
    while place < len(line):
        letter = line[place]
        if letter == "\\" and quote != "'":
            place += 2
            continue
        quote = _next_quote(quote, letter)
        if not quote:
            depth += (letter in "({") - (letter in ")}")
        pair = line[place : place + 2]
        found = "" if quote or depth > 0 else pair if pair in ("&&", "||") else letter if letter == ";" else ""
        if found:
            yield joint, line[start:place].strip()
            joint, start = found, place + len(found)
            place += len(found) - 1
        place += 1
    yield joint, line[start:].strip()


def _next_quote(quote: str, letter: str) -> str:
    """The quote that is open behind a letter; "" where none is."""
    if quote:
        return "" if letter == quote else quote
    return letter if letter in "\"'" else ""


def _bracket(letter: str, before: str, depth: int) -> int:
    """Whether a letter opens or closes an array's brackets, or one inside them."""
    if letter == "(":
        return int(depth > 0 or before == "=")
    return -int(letter == ")" and depth > 0)


class _Reader:
    """The variables that a script has set so far, and the command that it launches."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.variables: dict[str, str] = {}
        self.environment: dict[str, str] = {}
        self.unknown: list[str] = []
        self.launched: list[str] | None = None
        self.notes: list[str] = []
        self.branches: list[list[bool]] = []
        """Of every open if: whether its present branch holds, and whether one of them has held."""
        self.held = True
        """Whether the last test held: for what stands behind && or ||."""

    def take(self, joint: str, line: str) -> None:
        """One statement: an assignment is kept, a command that launches a program is unfolded, the rest is passed over.

        Branches are followed where their conditions compare known values; of others the first is taken, and that is noted.
        """
        stripped = line.strip()
        word, _, rest = stripped.partition(" ")
        if word in ("if", "elif", "else", "fi"):
            self._branch(word, rest.strip())
            if word != "else":
                return
            stripped = rest.strip()
        elif word in ("then", "do"):
            stripped = rest.strip()
        if not stripped or not all(active for active, _ in self.branches):
            return
        if TEST.match(stripped):
            self.held = self._holds(stripped)
            return
        if (joint == "&&" and not self.held) or (joint == "||" and self.held):
            return
        self.held = True if joint == "&&" else self.held
        self._statement(stripped)

    def _branch(self, word: str, condition: str) -> None:
        """Enters or leaves a branch."""
        if word == "if":
            holds = self._holds(condition)
            self.branches.append([holds, holds])
        elif word == "fi":
            if self.branches:
                self.branches.pop()
        elif self.branches:
            taken = self.branches[-1][1]
            holds = not taken and (word == "else" or self._holds(condition))
            self.branches[-1] = [holds, taken or holds]

    def _holds(self, condition: str) -> bool:
        """Whether a test holds; one that only the shell can decide does, and is noted."""
        if not all(active for active, _ in self.branches):
            return False
        found = outcome(self.expand(condition))
        if found is None:
            self.notes.append(f"the branch behind '{' '.join(condition.split())[:60]}': only the shell can decide it")
        return found is not False

    def _statement(self, stripped: str) -> None:
        assignments = self._assignments(stripped)
        for one in assignments:
            self._statement(one)
        if assignments:
            return
        match = ASSIGNMENT.match(stripped)
        if match and (match[3].startswith("(") or self._is_one_word(match[3]) or stripped.startswith(("export ", "declare "))):
            self._assign(match[1], bool(match[2]), match[3], exported=stripped.startswith("export "))
        elif self._may_launch(stripped):
            words = self.words(stripped)
            if any(PROGRAM.search(word) for word in words):
                self._launch(words)

    def _assignments(self, line: str) -> list[str]:
        """The parts of a line that is several assignments beside each other."""
        parts = re.findall(r"""(?:\$\([^)]*\)+|`[^`]*`|"[^"]*"|'[^']*'|\([^)]*\)|\$\{[^}]*\}|[^\s"'`(])+""", line)
        several = len(parts) > 1 and all(re.match(r"^[A-Za-z_]\w*\+?=", part) for part in parts)
        return parts if several else []

    def _is_one_word(self, value: str) -> bool:
        try:
            return len(shlex.split(re.sub(r"\$\([^)]*\)+|`[^`]*`|\$\{[^}]*\}", "x", value))) <= 1
        except ValueError:
            return True

    def _may_launch(self, line: str) -> bool:
        return ".py" in line or "torchtitan.train" in line or line.startswith(("$", '"$')) or line.split(" ")[0] in LAUNCHERS

    def _assign(self, name: str, more: bool, value: str, *, exported: bool) -> None:
        inner = value[1 : value.rfind(")")] if value.startswith("(") else value
        text = " ".join(shlex.quote(word) for word in self.words(inner)) if value.startswith("(") else self._plain(inner)
        joint = " " if value.startswith("(") else ""
        self.variables[name] = self.variables.get(name, "") + joint + text if more else text
        if len(self.variables[name]) > MOST_LETTERS:
            raise self.source.fail(f"the variable {name[:40]} unfolds without end")
        if exported:
            self.environment[name] = self.variables[name].strip()

    def _plain(self, value: str) -> str:
        """A scalar's value: quotes go, variables are filled in, inner spaces stay."""
        if value.startswith("'") and value.endswith("'") and len(value) > 1:
            return value[1:-1]
        if value.startswith('"') and value.endswith('"') and len(value) > 1:
            value = value[1:-1]
        elif value.endswith(";"):
            value = value[:-1]
        return self.expand(value)

    def _launch(self, words: list[str]) -> None:
        while words and (match := re.match(r"^([A-Za-z_]\w*)=(.*)$", words[0])):
            self.environment[match[1]] = match[2]
            words = words[1:]
        self.launched = words

    def words(self, text: str) -> list[str]:
        """The words of a piece of the script, variables filled in. Raises InputError."""
        text = re.sub(r"\"\$\{?[@*]\}?\"", "", text)  # the caller's own words: none here
        unfolded = self.expand(re.sub(r"(?<!\\)\"(\$\{\w+\[[@*]\]\})\"", r"\1", text))
        try:
            words = shlex.split(unfolded, comments=False)
        except ValueError as error:
            raise self.source.fail(f"a quote is not closed ({str(error).lower()}) in: {' '.join(text[:60].split())}...") from None
        if len(words) > MOST_WORDS:
            raise self.source.fail(f"its variables unfold to more than {MOST_WORDS:,} words")
        ends = [
            place
            for place, word in enumerate(words)
            if word in ("|", "||", "&&", ";", "&", ">", ">>", "2>&1", "2>", "&>") or word.startswith("2>")
        ]
        return words[: ends[0]] if ends else words

    def expand(self, text: str, depth: int = 0) -> str:
        """A text with its variables filled in; what only the shell would know stays as written and is noted."""
        if depth > MOST_DEPTH or len(text) > MOST_LETTERS:
            raise self.source.fail("its variables unfold without end")
        return REFERENCE.sub(lambda match: self._value(match, depth), text)

    def _value(self, match: re.Match[str], depth: int) -> str:
        name = match["braced"] or match["plain"]
        if match["sum"] is not None:
            return self._sum(match[0], match["sum"], depth)
        if name is None:
            self._note(match[0])
            ran = match["command"] or match["ticks"]
            return (
                ""
                if match["special"] is not None
                else f"$({(ran or match[0]).split()[0].strip('$({')})"
                if (ran or match[0]).split()
                else ""
            )
        default = match["default"] or ""
        if name in self.variables:
            return self.variables[name] if not default.lstrip(":").startswith("+") else self.expand(default.lstrip(":+"), depth + 1)
        if default and default.lstrip(":")[:1] in "-=":
            return self.expand(default.lstrip(":")[1:].strip("\"'"), depth + 1)
        self._note(f"${name}")
        return f"${name}"

    def _note(self, what: str) -> None:
        self.unknown.append(what if len(what) <= 40 else f"{what[:37]}...")

    def _sum(self, whole: str, text: str, depth: int) -> str:
        """Whole-number arithmetic of $(( )); what it cannot say stays as written."""
        filled = self.expand(re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"$\1", text), depth + 1)
        value = arithmetic(filled)
        if value is None:
            self._note(whole)
            return whole
        return str(value)


COMPARISONS: dict[str, Callable[[str, str], bool]] = {
    "=": lambda a, b: a == b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "-eq": lambda a, b: int(a) == int(b),
    "-ne": lambda a, b: int(a) != int(b),
    "-gt": lambda a, b: int(a) > int(b),
    "-ge": lambda a, b: int(a) >= int(b),
    "-lt": lambda a, b: int(a) < int(b),
    "-le": lambda a, b: int(a) <= int(b),
}


def outcome(condition: str) -> bool | None:
    """Whether a test of known values holds; None where only the shell could tell.

    >>> outcome('[ "7b" = "7b" ]'), outcome("[[ 4 -gt 16 ]]"), outcome("[ -n $X ]"), outcome("true"), outcome('[ -z "" ]')
    (True, False, None, True, True)
    """
    if "$" in condition:
        return None
    try:
        words = shlex.split(condition)
    except ValueError:
        return None
    if words in (["true"], ["false"]):
        return words == ["true"]
    if words and words[0] in ("[", "[[", "test"):
        words = [word for word in words[1:] if word not in ("]", "]]")]
        words = words if len(words) != 1 or not words[0].startswith("-") else [*words, ""]
        if len(words) == 2 and words[0] in ("-z", "-n"):
            return (words[1] == "") == (words[0] == "-z")
        if len(words) == 3 and words[1] in COMPARISONS:
            try:
                return COMPARISONS[words[1]](words[0], words[2])
            except ValueError:
                return None
    return None


OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def arithmetic(text: str) -> int | None:
    """The value of a sum of whole numbers, None where it is none.

    >>> arithmetic("8 * (2 + 1) / 4"), arithmetic("x + 1"), arithmetic("1 / 0"), arithmetic("2 ** 9")
    (6, None, None, None)
    """
    if len(text) > 200:
        return None
    try:
        return _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 1 << 62:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    raise ValueError("no sum of whole numbers")
