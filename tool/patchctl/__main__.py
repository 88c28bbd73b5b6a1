"""The program: `patchctl`, or `python -m patchctl`."""

import gc
import sys
from typing import NoReturn


def main() -> NoReturn:
    # What a start imports stays until the end; looking through it for garbage costs a tenth of a short command.
    gc.disable()
    try:
        from patchctl.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
