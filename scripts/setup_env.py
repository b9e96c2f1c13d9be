"""Creates the virtual environment that `make` uses, around a torch that is already installed if possible. Standard library only.

torch is searched in this order; an importable torch is used and never replaced:
  1. in the virtual environment itself,
  2. in the Python that runs this script (its packages are made visible to the virtual environment),
  3. with an NVIDIA GPU: installs the default build,
  4. without one: installs a local CPU build, else the CPU build that uv finds, else the default build.
Everything else is then installed around that torch, with the matching Triton release.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch>=2.11.0.dev0"
CPU_TORCH = "2.13.0"
TO_RUN = ("numpy", "rich", "typer", "pytest", "hypothesis", "triton")
TO_LINT = ("ruff", "mypy")
SHARED = "lent-packages.pth"


def log(text: str) -> None:
    """Print a line of progress."""
    print(f"setup: {text}", flush=True)


def fail(text: str) -> NoReturn:
    """Exit with a message that says why, and what to do."""
    sys.exit(f"setup: {text}")


def run_python(python: Path | str, code: str) -> str | None:
    """The output of a Python running `code`; None if it fails. -P keeps the checkout off the import path."""
    try:
        answer = subprocess.run([str(python), "-P", "-c", code], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def torch_version(python: Path | str) -> str | None:
    """The version of the torch a Python can import, if any, from its metadata, because pip compares that."""
    return run_python(python, "import torch; from importlib.metadata import version; print(version('torch'))")


def missing(python: Path | str, modules: tuple[str, ...]) -> list[str]:
    """The modules that a Python cannot import."""
    found = run_python(python, f"from importlib.util import find_spec; print(*(m for m in {modules!r} if find_spec(m)))")
    return [m for m in modules if m not in (found or "").split()]


def site_folders() -> list[str]:
    """The package folders of the Python that runs this script."""
    return [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages") and Path(p).is_dir()]


def make_venv(venv: Path, with_pip: bool) -> None:
    """Create the virtual environment."""
    log(f"creating {venv.name} with Python {sys.version.split()[0]}")
    base = getattr(sys, "_base_executable", sys.executable)
    command = [base, "-m", "venv", "--clear", str(venv)] + ([] if with_pip else ["--without-pip"])
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        shutil.rmtree(venv, ignore_errors=True)
        major, minor = sys.version_info[:2]
        fail(
            f"a virtual environment could not be made. On Debian and Ubuntu: sudo apt install python{major}.{minor}-venv\n"
            f"{(made.stdout + made.stderr).strip()}"
        )


def pth(venv: Path, name: str) -> Path:
    """The path of a .pth file of the virtual environment."""
    return next((venv / "lib").glob("python3.*")) / "site-packages" / name


def share_packages(venv: Path) -> None:
    """Add this Python's packages to the virtual environment, after its own.

    --system-site-packages would add those of the base installation, which differ if this Python is itself in a virtual
    environment.
    """
    lines = [f"import site; site.addsitedir({folder!r})" for folder in site_folders()]
    pth(venv, SHARED).write_text("\n".join(lines) + "\n")


def pip(python: Path, *arguments: str, quiet: bool = False) -> bool:
    """Run pip install. Returns whether it succeeded."""
    # --no-compile: byte-compiling takes a third of the time of a fresh setup.
    command = [str(python), "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, stderr=subprocess.DEVNULL if quiet else None).returncode == 0


def has_gpu() -> bool:
    """Whether an NVIDIA driver responds."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def uv_cpu_torch(python: Path) -> bool:
    """Install the CPU build with uv, if uv is available. Returns whether it succeeded."""
    uv = shutil.which("uv")
    command = [uv or "", "pip", "install", "--python", str(python), "--torch-backend=cpu", f"torch=={CPU_TORCH}"]
    return uv is not None and subprocess.run(command).returncode == 0


def install_torch(python: Path) -> None:
    """Install torch."""
    if has_gpu():
        log("found an NVIDIA GPU: installing the default torch, about 3 GB to download")
        done = pip(python, TORCH)
    else:
        log(f"no GPU: looking for a CPU build of torch {CPU_TORCH}")
        done = pip(python, f"torch=={CPU_TORCH}+cpu", quiet=True) or uv_cpu_torch(python)
        if not done:
            size = "2.7 GB to download, 4.8 GB on disk" if sys.platform == "linux" else "about 0.2 GB to download"
            log(f"none found (uv could find one): installing the default build, {size}")
            done = pip(python, f"torch=={CPU_TORCH}")
    if not done:
        fail("torch could not be installed. Install it yourself, then pass that Python: make PYTHON=...")


def constraint_files(version: str) -> list[Path]:
    """The constraint files for a torch version."""
    minor = ".".join(version.split(".")[:2])
    return [f for f in (ROOT / "constraints/common.txt", ROOT / f"constraints/torch-{minor}.txt") if f.exists()]


def install_rest(python: Path, version: str) -> bool:
    """Install onepass and its dependencies, keeping the installed torch."""
    extras = ["dev"] + (["cpu"] if missing(python, ("triton",)) else [])
    log(f"torch {version}; installing onepass[{','.join(extras)}]")
    with tempfile.TemporaryDirectory() as scratch:
        pinned = Path(scratch) / "torch.txt"
        pinned.write_text(f"torch=={version}\n")
        constraints = [a for f in (*constraint_files(version), pinned) for a in ("--constraint", str(f))]
        return pip(python, *constraints, "--editable", f"{ROOT}[{','.join(extras)}]")


def use_as_is(venv: Path, python: Path) -> None:
    """Use the packages of this Python: add the checkout to the path, and try to install missing linters."""
    pth(venv, "00-onepass-checkout.pth").write_text(f"{ROOT}\n")
    absent = missing(python, TO_LINT)
    if absent and not missing(python, ("pip",)) and pip(python, "--retries", "0", "--timeout", "10", *absent, quiet=True):
        absent = []
    log("everything needed is already installed" + (f", except {' and '.join(absent)} for `make lint`" if absent else ""))


def find_torch(venv: Path, python: Path) -> str:
    """The version of the torch the virtual environment uses. Shares this Python's torch or installs one if necessary."""
    version = torch_version(python)
    if version is None and (shared := torch_version(sys.executable)):
        log(f"using torch {shared} of {sys.executable}")
        share_packages(venv)
        version = torch_version(python)
    if version is None:
        install_torch(python)
        version = torch_version(python)
    return version or fail(f"torch is installed but cannot be imported; see why with: {python} -c 'import torch'")


def set_up(venv: Path) -> None:
    """Set up the environment. Takes a few seconds if there is nothing to do."""
    python = venv / "bin" / "python"
    complete = not missing(sys.executable, ("torch", *TO_RUN))
    if run_python(python, "") is None:
        # If nothing needs to be installed, pip is not needed either; Debian packages it separately.
        make_venv(venv, with_pip=not complete or not missing(sys.executable, ("ensurepip",)))
    version = find_torch(venv, python)
    if complete and pth(venv, SHARED).exists():
        use_as_is(venv, python)
    elif not install_rest(python, version):
        fail(
            "installation failed; see the messages above. Without a network, run make with a Python that has torch, "
            f"{', '.join(TO_RUN)}: make PYTHON=..."
        )


if __name__ == "__main__":
    set_up(Path(sys.argv[1] if len(sys.argv) > 1 else ".venv").absolute())
