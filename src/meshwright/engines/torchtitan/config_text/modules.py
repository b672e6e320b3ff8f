"""The text of the modules of a configuration: of its own project, and of torchtitan. None of them is imported."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.json_values import load_json, load_text

LARGEST_BYTES = 1 << 20
TORCHTITAN = "torchtitan"
RELEASE = Path(__file__).with_name("release.json")
"""The text of a release of torchtitan without what its configurations do not need."""


@dataclass(frozen=True, kw_only=True)
class ModuleText:
    """The text of a module; `is_part`: names that it lacks are elsewhere."""

    file: str
    text: str
    is_package: bool
    is_part: bool = False


class ProjectModules:
    """Modules below `root`, a folder on Python's path; torchtitan's else as installed, else of its release as data."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._found: dict[str, ModuleText | None] = {}

    @property
    def times(self) -> dict[str, int]:
        """Return the files that were looked at, with the times of their last change."""
        return {one.file: changed_ns(one.file) for one in self._found.values() if one and not one.is_part}

    @cached_property
    def _installed(self) -> Path | None:
        spec = find_spec(TORCHTITAN)  # looks for the folder, and imports nothing
        return Path(spec.origin).resolve().parents[1] if spec and spec.origin else None

    def find(self, name: str) -> ModuleText | None:
        """Return the text of a module; None: it is not at hand."""
        if name not in self._found:
            is_titan = name.partition(".")[0] == TORCHTITAN
            is_own = not is_titan or (self._root / TORCHTITAN / "__init__.py").is_file()
            root = self._root if is_own else self._installed
            if name.partition(".")[0] == __name__.partition(".")[0]:  # of exports
                root = Path(__file__).resolve().parents[len(__name__.split(".")) - 1]
            self._found[name] = _read(root, name) if root else _of_release(name)
        return self._found[name]


def _read(root: Path, name: str) -> ModuleText | None:
    whole = root.joinpath(*name.split("."))
    for path, is_package in ((whole / "__init__.py", True), (whole.with_suffix(".py"), False)):
        if path.is_file() and path.resolve().is_relative_to(root) and path.stat().st_size <= LARGEST_BYTES:
            try:
                return ModuleText(file=str(path), text=load_text(path), is_package=is_package)
            except (OSError, ValueError):  # of another encoding
                return None
    return None


def _of_release(name: str) -> ModuleText | None:
    content = _release()
    is_package, text = content["modules"].get(name, (False, None))
    file = f"{TORCHTITAN} {content['release']}: {name}"
    return None if text is None else ModuleText(file=file, text=text, is_package=is_package, is_part=True)


@cache
def _release() -> dict[str, Any]:
    content: dict[str, Any] = load_json(RELEASE)
    return content


def changed_ns(file: str) -> int:
    """Return the time of a file's last change; 0: there is none."""
    try:
        return Path(file).stat().st_mtime_ns
    except OSError:
        return 0


def module_of(path: Path) -> tuple[Path, str]:
    """Return the folder on Python's path and the name of the module in `path`, which packages may contain."""
    folder, names = path.resolve().parent, [path.stem]
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(names)
