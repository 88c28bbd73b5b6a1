"""The program: `patchctl`, or `python -m patchctl`."""

import contextlib
import gc
import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and end the process."""
    # What a start imports stays until the end; looking through it for garbage costs a tenth of a short command.
    gc.disable()
    try:
        from patchctl.cli import main as run

        run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except KeyboardInterrupt:  # while the imports were under way
        code = 130
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed at the other end: nobody is left to tell
            stream.flush()
    os._exit(code)  # taking every module apart first costs a twentieth; nothing is left that an exit would clean up


if __name__ == "__main__":
    main()
