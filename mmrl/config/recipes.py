"""Recipes and overlays by name, the comments at their top, and the files they expect below `data.dir`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import mmrl
from mmrl.types import UserError
from mmrl.utils.files import shipped_folder
from mmrl.utils.messages import did_you_mean

if TYPE_CHECKING:
    from mmrl.config.load import LoadedConfig

BY_HARDWARE: Final = "by hardware"  # task of recipes that reproduce no paper
DATA: Final = "${data}"  # placeholder for `data.dir` in the texts of a config
LABELS: Final = ("Task", "Numbers", "Prompt", "Data", "Hardware", "Memory", "Benchmarks", "Departures")  # in order
_SECTION: Final = re.compile(rf"\n# ({'|'.join(LABELS)}): ?(.*(?:\n#   .*)*)")
_COMMAND: Final = re.compile(r"\n# +\$ (.*)")


class Header(NamedTuple):
    """The comment at the top of a recipe or an overlay."""

    title: str  # the name of the system and its paper
    summary: str  # what it does, in one line
    sections: Mapping[str, str]  # text by label
    downloads: tuple[str, ...]  # commands that fetch the data, to be run in the data folder
    text: str  # the comment as written


def configs_folder() -> Path:
    """Return the folder of the configs that come with mmrl."""
    return shipped_folder(Path(mmrl.__file__).parents[1], "mmrl_configs", "configs")


def iter_recipes(kind: str = "recipes") -> Iterable[Path]:
    """Return the files of all recipes, or of all overlays with `kind` "overlays", by name."""
    return sorted((configs_folder() / kind).glob("*.yaml"))


def group_by_task(words: Iterable[str] = ()) -> dict[str, list[tuple[Path, Header]]]:
    """Return the recipes that have all of the words, with their headers, by task; those for hardware come last."""
    groups: dict[str, list[tuple[Path, Header]]] = {}
    for file in iter_recipes():
        text = f"{file.stem}\n{file.read_text(encoding='utf-8')}".lower()
        if all(word.lower() in text for word in words):
            header = read_header(file)
            groups.setdefault(header.sections.get("Task", BY_HARDWARE), []).append((file, header))
    return {task: groups[task] for task in sorted(groups, key=lambda task: (task == BY_HARDWARE, task))}


def find_config(name: str | Path, kind: str = "recipes") -> Path:
    """Return a path unchanged; for a bare name, the file of that recipe or other config that comes with mmrl.

    Raises:
        UserError: there is neither a file nor a recipe of this name, or it is a directory.
    """
    path = Path(name)
    if not re.fullmatch(r"[\w-]+", str(name)) or path.is_file():
        return path
    for folder in (kind, "."):
        file = configs_folder() / folder / f"{name}.yaml"
        if file.is_file():
            return file
    if path.is_dir():
        raise UserError(f"{name} is a directory; name the .yaml file in it")
    names = [file.stem for file in iter_recipes(kind)]
    there_are = "`mmrl recipe list` shows all" if kind == "recipes" else f"there are {', '.join(names)}"
    hint = did_you_mean(path.name.lower().replace("-", "_"), names, limit=3, quote="") or there_are
    raise UserError(f"{name}: there is no such file and none of the {kind} has this name; {hint}")


def read_header(path: Path) -> Header:
    """Return the header of a recipe or an overlay; a file without one has an empty one.

    Line 1 is `# Title (paper): summary.` or `# Title: summary.`. Each label begins a line, and its text continues in
    lines that are indented further. Lines that begin with `$` are commands.
    """
    text = "\n".join(takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines()))
    first = text.partition("\n")[0].strip("# ")
    # The link of a paper has a colon of its own: `VLM-R1 (arXiv:2504.07615): ...`.
    title, separator, summary = first.partition("): " if "): " in first else ": ")
    title, summary = title + separator.rstrip(": "), summary.strip().rstrip(".")
    sections = {}
    for label, section in _SECTION.findall(_COMMAND.sub("", text)):
        sections[label] = " ".join(line.strip("# ") for line in section.splitlines()).strip()
    return Header(title, summary, sections, tuple(_COMMAND.findall(text)), text)


def check_data_files(loaded: LoadedConfig) -> None:
    """Check, before any is read, that the files a config names as `${data}/...` exist.

    Raises:
        UserError: no data folder was given, or files are missing; with the commands that fetch them.
    """
    missing, folder = find_missing_data(loaded), loaded.config.data.dir
    if not missing:
        return
    if folder is None:
        raise UserError(f"{loaded.files[0]}: reads {DATA}/{loaded.data_files[0]}; name its folder with --data DIR")
    lines = [] if Path(folder).is_dir() else [f"{folder}: there is no such folder"]
    for advice in dict.fromkeys(missing.values()):
        names = [name for name, own_advice in missing.items() if own_advice == advice]
        lines.append(f"{folder}: has no {', '.join(names)}{advice}")
    # Not every file is published as the recipe reads it, so the text says what has to be written by hand.
    headers = [read_header(file) for file in loaded.files if file.is_file()]
    texts = [header.sections["Data"] for header in headers if "Data" in header.sections]
    raise UserError("\n".join([*lines, *(f"Data: {text}" for text in texts[:1])]))


def find_missing_data(loaded: LoadedConfig) -> dict[str, str]:
    """Return the paths below the data folder that are not there, each with the end of a message: how to fetch it."""
    folder = loaded.config.data.dir
    headers = [read_header(file) for file in loaded.files if file.is_file()]
    downloads = [command for header in headers for command in header.downloads]
    unknown = "; no command of the header fetches it" if any(header.text for header in headers) else ""
    missing = {}
    for name in loaded.data_files:
        if folder is None or not Path(folder, name).exists():
            # A command fetches the files below the folder, or the file, that it names: eurosat-4shot is not eurosat.
            mentions = re.compile(rf"(?<![\w-]){re.escape(name.split('/')[0])}(?![\w-])")
            command = next(filter(mentions.search, downloads), None)
            missing[name] = f"; run there: {command}" if command else unknown
    return missing
