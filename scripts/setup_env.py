"""Make the virtual environment `make` runs in, with whatever this machine offers. Standard library only.

torch is looked for in this order, and one that can be imported is used and never replaced:
  1. in the virtual environment itself,
  2. in the Python that runs this script (its packages are lent to the virtual environment),
  3. with an NVIDIA GPU: the default build,
  4. without one: a local CPU build, then the CPU build uv knows to find, then the default build.
Everything else is then installed around that torch, with the Triton release it pairs with.
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
LENT = "lent-packages.pth"


def say(text: str) -> None:
    """One line of progress."""
    print(f"setup: {text}", flush=True)


def stop(text: str) -> NoReturn:
    """End with the reason and the way out."""
    sys.exit(f"setup: {text}")


def ask(python: Path | str, code: str) -> str | None:
    """What a Python prints when it runs `code`; None when it fails. -P keeps the checkout itself from being found."""
    try:
        answer = subprocess.run([str(python), "-P", "-c", code], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def torch_version(python: Path | str) -> str | None:
    """The version of the torch a Python can import, if any: as its metadata has it, because that is what pip compares."""
    return ask(python, "import torch; from importlib.metadata import version; print(version('torch'))")


def missing(python: Path | str, modules: tuple[str, ...]) -> list[str]:
    """Those of `modules` that a Python cannot find."""
    found = ask(python, f"from importlib.util import find_spec; print(*(m for m in {modules!r} if find_spec(m)))")
    return [m for m in modules if m not in (found or "").split()]


def site_folders() -> list[str]:
    """Where the Python running this keeps its packages."""
    return [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages") and Path(p).is_dir()]


def make_venv(venv: Path, with_pip: bool) -> None:
    """Create the virtual environment."""
    say(f"creating {venv.name} with Python {sys.version.split()[0]}")
    base = getattr(sys, "_base_executable", sys.executable)
    command = [base, "-m", "venv", "--clear", str(venv)] + ([] if with_pip else ["--without-pip"])
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        shutil.rmtree(venv, ignore_errors=True)
        major, minor = sys.version_info[:2]
        stop(f"a virtual environment could not be made. On Debian and Ubuntu: sudo apt install python{major}.{minor}-venv\n"
             f"{(made.stdout + made.stderr).strip()}")


def pth(venv: Path, name: str) -> Path:
    """The path of a .pth file of the virtual environment."""
    return next((venv / "lib").glob("python3.*")) / "site-packages" / name


def lend_packages(venv: Path) -> None:
    """Let the virtual environment import what this Python can, after its own packages.

    --system-site-packages would name the base installation, which is another place when this Python is itself in a virtual
    environment.
    """
    lines = [f"import site; site.addsitedir({folder!r})" for folder in site_folders()]
    pth(venv, LENT).write_text("\n".join(lines) + "\n")


def pip(python: Path, *arguments: str, hush: bool = False) -> bool:
    """Run pip's install; whether it worked."""
    # Byte-compiling what is installed takes a third of the time of a fresh set-up.
    command = [str(python), "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, stderr=subprocess.DEVNULL if hush else None).returncode == 0


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def uv_cpu_torch(python: Path) -> bool:
    """Let uv, where there is one, install the CPU build from where it is published."""
    uv = shutil.which("uv")
    command = [uv or "", "pip", "install", "--python", str(python), "--torch-backend=cpu", f"torch=={CPU_TORCH}"]
    return uv is not None and subprocess.run(command).returncode == 0


def install_torch(python: Path) -> None:
    """Install torch where none can be imported."""
    if has_gpu():
        say("an NVIDIA GPU answers: installing the default torch, about 3 GB to download")
        done = pip(python, TORCH)
    else:
        say(f"no GPU: looking for a CPU build of torch {CPU_TORCH}")
        done = pip(python, f"torch=={CPU_TORCH}+cpu", hush=True) or uv_cpu_torch(python)
        if not done:
            size = "2.7 GB to download, 4.8 GB on disk" if sys.platform == "linux" else "about 0.2 GB to download"
            say(f"none found (uv would know where to look): installing the default build, {size}")
            done = pip(python, f"torch=={CPU_TORCH}")
    if not done:
        stop("torch could not be installed. Install it by hand, then name that Python: make PYTHON=...")


def constraint_files(version: str) -> list[Path]:
    """The constraints that go with a torch version."""
    minor = ".".join(version.split(".")[:2])
    return [f for f in (ROOT / "constraints/common.txt", ROOT / f"constraints/torch-{minor}.txt") if f.exists()]


def install_rest(python: Path, version: str) -> bool:
    """Install onepass and its tools around the torch that is there."""
    extras = ["dev"] + (["cpu"] if missing(python, ("triton",)) else [])
    say(f"torch {version}; installing onepass[{','.join(extras)}]")
    with tempfile.TemporaryDirectory() as scratch:
        held = Path(scratch) / "torch.txt"
        held.write_text(f"torch=={version}\n")
        constraints = [a for f in (*constraint_files(version), held) for a in ("--constraint", str(f))]
        return pip(python, *constraints, "--editable", f"{ROOT}[{','.join(extras)}]")


def use_as_is(venv: Path, python: Path) -> None:
    """Nothing must be installed to run: point the virtual environment at the checkout, try for the linters, go on without."""
    pth(venv, "00-onepass-checkout.pth").write_text(f"{ROOT}\n")
    absent = missing(python, TO_LINT)
    if absent and not missing(python, ("pip",)) and pip(python, "--retries", "0", "--timeout", "10", *absent, hush=True):
        absent = []
    say("everything needed to run is here already" + (f", except {' and '.join(absent)} for `make lint`" if absent else ""))


def find_torch(venv: Path, python: Path) -> str:
    """The version of the torch the virtual environment will use, borrowed or installed if it must be."""
    version = torch_version(python)
    if version is None and (lender := torch_version(sys.executable)):
        say(f"using torch {lender} of {sys.executable}")
        lend_packages(venv)
        version = torch_version(python)
    if version is None:
        install_torch(python)
        version = torch_version(python)
    return version or stop(f"torch is installed but cannot be imported; see why with: {python} -c 'import torch'")


def set_up(venv: Path) -> None:
    """The whole set-up; a few seconds when there is nothing to do."""
    python = venv / "bin" / "python"
    complete = not missing(sys.executable, ("torch", *TO_RUN))
    if ask(python, "") is None:
        # Where nothing needs installing, neither does pip, which Debian ships apart.
        make_venv(venv, with_pip=not complete or not missing(sys.executable, ("ensurepip",)))
    version = find_torch(venv, python)
    if complete and pth(venv, LENT).exists():
        use_as_is(venv, python)
    elif not install_rest(python, version):
        stop("installing failed; the lines above say why. Without a network, run make with a Python that has torch, "
             f"{', '.join(TO_RUN)}: make PYTHON=...")


if __name__ == "__main__":
    set_up(Path(sys.argv[1] if len(sys.argv) > 1 else ".venv").absolute())
