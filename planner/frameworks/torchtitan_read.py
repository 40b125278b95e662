"""Reads torchtitan's configurations: TOML files of 0.2, and launch commands of 0.3 (and of 0.2, with the file that they name)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.catalogue import load
from planner.catalogue.schema import Model
from planner.frameworks.config import Config
from planner.frameworks.files import Source, hint, open_source, shown
from planner.frameworks.reading import Reader
from planner.frameworks.shell import read_script
from planner.frameworks.torchtitan_keys import NEW_KIND, OLD_COMMAND, OLD_KIND, setting, typed
from planner.frameworks.torchtitan_meaning import meaning
from planner.frameworks.torchtitan_models import (
    FLAVORS,
    OTHER_MODULES,
    OWN_MODULE,
    RECIPES,
    WITHOUT_CATALOGUE,
    Recipe,
    find_flavor,
    recipe_of,
)

PROGRAM = re.compile(r"(^|[/.])torchtitan[./]train(\.py)?$|(^|/)run_train\.sh$|^torchtitan/train\.py$")
MODES = {"selective": "selective", "full": "full", "none": "none", "memory-budget": "memory_budget", "memory_budget": "memory_budget"}
CONFIG_FILE = ("job.config_file", "job.config-file")


def is_toml(source: Source) -> bool:
    """Whether a TOML file is torchtitan's: it has its tables, and a flavor or degrees of parallelism."""
    data = source.data
    if data is None or source.ending != ".toml":
        return False
    model, degrees = data.get("model"), data.get("parallelism")
    flavored = isinstance(model, dict) and "flavor" in model
    return flavored or (isinstance(degrees, dict) and ("training" in data or "job" in data))


def read_toml(source: Source, num_gpus: int | None) -> Config:
    """What a TOML file of 0.2 says. Raises InputError."""
    settings = old_settings(source, source.data or {})
    return meaning(source, OLD_KIND, settings, num_gpus, named_model(source, settings))


def old_settings(source: Source, data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a TOML file with their values, tables joined by dots. Raises InputError for a value of the wrong type."""
    return {key: typed(source, key, value) for key, value in _flat(source, data)}


def _flat(source: Source, data: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict) and depth < 4:
            yield from _flat(source, value, f"{prefix}{key}.", depth + 1)
        elif not prefix:
            raise source.fail(f"{shown(key)} = {shown(value)} stands outside any table; it must be in one such as [training]")
        else:
            yield f"{prefix}{key}", value


def named_model(source: Source, settings: Mapping[str, Any]) -> Model | None:
    """The catalogue's model of model.name and model.flavor; None where the catalogue has none. Raises InputError for unknown ones."""
    return model_of(source, str(setting(settings, "model.name")), str(setting(settings, "model.flavor")))


def model_of(source: Source, module: str, flavor: str) -> Model | None:
    """The catalogue's model of a module's flavor; None where the catalogue has none. Raises InputError where torchtitan has none."""
    modules = sorted({row.module for row in FLAVORS})
    if module in OTHER_MODULES:
        return None
    if module not in modules:
        raise source.fail(f"model.name = {shown(module)} is no model of torchtitan{hint(module, [*modules, *OTHER_MODULES])}")
    found = find_flavor(module, flavor)
    if found is None:
        if flavor in WITHOUT_CATALOGUE or flavor.startswith("debugmodel"):
            return None
        known = [row.old for row in FLAVORS if row.module == module and row.old]
        raise source.fail(f"model.flavor = {shown(flavor)} is no flavor of {module}{hint(flavor, known)}")
    return load.find(Model, found.model) if found.model else None


# Commands


def is_command(source: Source) -> bool:
    """Whether a script launches torchtitan."""
    if source.data is not None:
        return False
    text = source.text[: 1 << 18]
    named = "torchtitan" in text or "run_train.sh" in text
    return named and ("--module" in text or "--job.config" in text or "torchtitan.train" in text or "torchtitan/train.py" in text)


def read_command(source: Source, num_gpus: int | None) -> Config:
    """What a launch command says: of 0.3 with --module and --config, of 0.2 with --job.config_file. Raises InputError."""
    script = read_script(source)
    launcher, words = split_command(source, script.words)
    gpus = num_gpus or launched_gpus(launcher)
    stated = options(source, words)
    file = next((stated[key] for key in CONFIG_FILE if key in stated), None)
    if file is not None or "module" not in stated:
        return _read_old_command(source, stated, file, gpus)
    recipe = _recipe(source, stated)
    own = {key: typed(source, key, value) for key, value in stated.items()}
    settings = {**recipe.settings, **own}
    model = model_of(source, recipe.module, recipe.flavor)
    return meaning(source, NEW_KIND, settings, gpus, model, precision=recipe.precision, stated=tuple(own), unknown=script.unknown)


def _read_old_command(source: Source, stated: Mapping[str, Any], file: Any, gpus: int | None) -> Config:
    settings: dict[str, Any] = {}
    if file is not None:
        settings = old_settings(found := beside(source, str(file)), found.data or {})
    own = {key: typed(source, key, value) for key, value in stated.items() if key not in CONFIG_FILE}
    if file is None and not own:
        raise source.fail("the launch of torchtitan states neither --module and --config (0.3) nor --job.config_file (0.2)")
    settings |= own
    return meaning(source, OLD_COMMAND, settings, gpus, named_model(source, settings))


def beside(source: Source, name: str) -> Source:
    """The TOML file that a command names: beside the script, or where the command would look. Raises InputError."""
    tries = [source.path.parent / name, source.path.parent / Path(name).name, Path(name)]
    for path in tries:
        if load.exists(path) and path.is_file():
            return open_source(path)
    raise source.fail(f"--job.config_file {shown(name)} is not there; put the file beside the script")


def _recipe(source: Source, stated: Mapping[str, Any]) -> Recipe:
    module, name = str(stated["module"]), stated.get("config")
    module = module.removeprefix("torchtitan.models.").removesuffix(".config_registry")
    if name is None:
        raise source.fail(f"--module {shown(module)} needs --config with the name of a configuration, such as llama3_8b")
    found = recipe_of(str(name), module)
    if found is not None:
        return found
    modules = sorted({row.module for row in RECIPES.values()} | set(OTHER_MODULES) | {OWN_MODULE})
    if module not in modules:
        raise source.fail(f"--module {shown(module)} is no module of torchtitan{hint(module, modules)}")
    known = [recipe for recipe, row in RECIPES.items() if row.module == module]
    raise source.fail(f"--config {shown(name)} is no configuration of {module} that is known here{hint(name, known)}")


def split_command(source: Source, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's words and the program's. Raises InputError for a command that does not run torchtitan."""
    for place, word in enumerate(words):
        if PROGRAM.search(word):
            return list(words[:place]), list(words[place + 1 :])
    raise source.fail("the command launches no torchtitan.train")


def options(source: Source, words: Sequence[str]) -> dict[str, Any]:
    """A command's settings by key: texts, switches and lists. Hyphens count as underscores; a no- before the last part switches off.

    Raises InputError for a word that belongs to no setting.
    """
    found: dict[str, Any] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key, switch = _key(name)
            found[key] = value if equals else switch
        elif re.match(r"activation[-_]checkpoint:", word):
            mode = word.partition(":")[2]
            found["activation_checkpoint.mode"], key = MODES.get(mode, mode), ""
        elif key:
            before = found[key]
            found[key] = word if before is True else [*(before if isinstance(before, list) else [before]), word]
        elif not word.startswith("$"):
            raise source.fail(f"{shown(word)} belongs to no setting; it must be a flag such as --training.seq_len 4096")
    return found


def _key(name: str) -> tuple[str, bool]:
    """A flag's key in underscores, and whether the flag by itself switches on.

    >>> _key("compile.no-enable"), _key("training.seq-len")
    (('compile.enable', False), ('training.seq_len', True))
    """
    section, dot, last = name.replace("-", "_").rpartition(".")
    return (f"{section}{dot}{last.removeprefix('no_')}", not last.startswith("no_"))


def launched_gpus(words: Sequence[str]) -> int | None:
    """GPUs that a launcher starts, where its words say so in numbers.

    >>> launched_gpus(["torchrun", "--nnodes=2", "--nproc_per_node", "8"]), launched_gpus(["torchrun", "--nnodes", "$N"])
    (16, None)
    """
    joined = " ".join(words).replace("=", " ").replace("-", "_")
    nodes, each = (re.search(rf"__{flag} (\d{{1,6}})(?!\S)", joined) for flag in ("nnodes", "nproc_per_node"))
    if each is None or (nodes is None and "__nnodes" in joined):
        return None
    return int(each[1]) * (int(nodes[1]) if nodes else 1) or None


READERS = (
    Reader("torchtitan TOML (0.2)", is_toml, read_toml),
    Reader("torchtitan launch command (0.3)", is_command, read_command),
)
