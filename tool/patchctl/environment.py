"""The environment variables that patchctl reads, beside each upstream's URL variable, which configs/pins.toml names."""

from __future__ import annotations

VARIABLES = {
    "PATCHCTL_ROOT": "the project that holds series, patches and pins, as `--root`",
    "PATCHCTL_CACHE": "where downloaded wheels are kept (default: `patchctl` in the user's cache folder)",
    "PATCHCTL_DEBUG": "`1`: an error that nobody foresaw shows where it comes from",
}
