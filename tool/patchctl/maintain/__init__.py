"""For maintainers: edit the series as commits, write it back, carry it to another commit of upstream."""

from patchctl.maintain.rewrite import refresh

__all__ = ["refresh"]
