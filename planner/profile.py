"""A profile: constants of a user's own cluster and stack that replace the shipped ones, in a TOML file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from planner.catalogue import load
from planner.catalogue.schema import Generation, Physics, Software
from planner.errors import InputError, nearest

Record = TypeVar("Record", Generation, Software, Physics)

KINDS: Mapping[str, type] = {"generation": Generation, "software": Software, "physics": Physics}

Profile = Mapping[tuple[str, str], Mapping[str, float]]
"""(record kind, record name) -> constants in base units."""


def read_profile(path: Path) -> Profile:
    """The constants of a profile file: tables [kind.name] with fields in base units. Raises InputError."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for kind, records in load.read_toml(path).items():
        if kind == "description":
            continue
        if kind not in KINDS:
            raise InputError(f"{path}: unknown table '{kind}'{nearest(kind, KINDS)}")
        if not isinstance(records, dict):
            raise InputError(f"{path}: '{kind}' must be a table of records")
        for name, constants in records.items():
            record: Any = load.find(KINDS[kind], str(name))
            if not isinstance(constants, dict):
                raise InputError(f"{path}: {kind}.{name} must be a table of constants")
            known = [f.name for f in dataclasses.fields(record) if isinstance(getattr(record, f.name), float)]
            for key, value in constants.items():
                if key not in known:
                    raise InputError(f"{path}: {kind}.{name} has no constant '{key}'{nearest(key, known)}")
                checked = load.checked(float, value, f"{path}: {kind}.{name}.{key}")
                found.setdefault((kind, record.name), {})[key] = checked
    return found


def tuned(record: Record, profile: Profile) -> Record:
    """The record with the profile's constants in place of its own."""
    kind = next(kind for kind, cls in KINDS.items() if isinstance(record, cls))
    changes: Mapping[str, Any] = profile.get((kind, record.name), {})
    return dataclasses.replace(record, **changes) if changes else record


def profile_text(profile: Profile, description: str) -> str:
    """The TOML file of a profile."""
    lines = [f'description = "{description}"']
    for (kind, name), constants in sorted(profile.items()):
        lines += ["", f"[{kind}.{name}]"] + [f"{key} = {value:.6g}" for key, value in sorted(constants.items())]
    return "\n".join(lines) + "\n"
