"""The files of the page: `python -m examples.browser.make_page FOLDER PACKAGES`. PACKAGES is a `node_modules`."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from examples.browser import onnx_model
from jsg import cli
from jsg.sources import EMBEDDED

HERE = Path(__file__).parent
MODULE = HERE.parents[1] / "js" / "grammar"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
}
PACKAGES = {
    "onnxruntime-web": ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"),
    "tokenizers": ("tokenizers.min.mjs",),
}
"""Package → its files that the page loads."""


def make_page(folder: Path, packages: Path) -> None:
    """Writes the page with the embedded model, a grammar, and everything that it loads, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("index.html", "page.js", "generate.js", "transformers.js"):
        shutil.copy(HERE / name, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED["tiny"] / name, folder)
    for package, names in PACKAGES.items():
        (folder / package).mkdir(exist_ok=True)
        (source,) = packages.glob(f"**/{package}/dist")
        for name in names:
            shutil.copy(source / name, folder / package)
    onnx_model.main(str(folder / "model.onnx"))
    grammar = ["--json-schema", json.dumps(SCHEMA), "--tokenizer", "tiny"]
    if cli.main(["grammar", "export", str(folder / "record.grammar"), *grammar]):
        raise SystemExit("the grammar could not be exported, for the reason above")
    (folder / "grammar").mkdir(exist_ok=True)
    for file in MODULE.glob("*.js"):
        shutil.copy(file, folder / "grammar")
    subprocess.run([sys.executable, MODULE / "build.py", folder / "grammar/dist"], check=True)


if __name__ == "__main__":
    make_page(*map(Path, sys.argv[1:]))
