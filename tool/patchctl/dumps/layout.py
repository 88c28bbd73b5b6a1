"""Where msprobe put a dump.

msprobe writes `step0/rank0`, or `step0/proc{pid}` where torch.distributed was not initialised; the dump document
writes `step_0/rank_0`. All of them are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class DumpTree:
    """A dump folder: `root/step{N}/rank{M}/dump.json`, for inference one level deeper under the process's folder."""

    root: Path
    _folders: dict[str, dict[int, str]] = field(default_factory=dict, repr=False, compare=False)

    def find(self, step: int, rank: int, folder: str = "", pid: int | None = None) -> Path | None:
        """The dump.json of a step, None when it was not written."""
        name = self.steps(folder).get(step)
        if name is None:
            return None
        base = self.root / folder / name
        for rank_name in (f"rank{rank}", f"rank_{rank}", *(() if pid is None else (f"proc{pid}", f"proc_{pid}"))):
            path: Path = base / rank_name / "dump.json"
            if path.is_file():
                return path
        return None

    def steps(self, folder: str = "") -> dict[int, str]:
        """Step number -> folder name, read once for each process folder."""
        known = self._folders.get(folder)
        if known is None:
            known = self._folders[folder] = {}
            base = self.root / folder
            for path in sorted(base.iterdir()) if base.is_dir() else ():
                number = path.name.removeprefix("step").removeprefix("_")
                if path.name.startswith("step") and number.isascii() and number.isdigit():
                    known.setdefault(int(number), path.name)
        return known
