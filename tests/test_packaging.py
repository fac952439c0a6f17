"""What people install: commands that work, and what a distribution holds."""

import re
import subprocess
import tomllib

from jsg.extras import EXTRAS
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXTS = (".md", ".py", ".toml", ".yaml", ".yml", ".js", ".html", "Dockerfile", "Makefile")
HISTORY = ("CHANGELOG.md", "bench/results/")


def texts() -> dict[str, str]:
    """Path → text of what people read: the pages, the code and its messages."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.splitlines() if name.endswith(TEXTS) and not name.startswith(HISTORY)]
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in names if (ROOT / name).is_file()}


class TestExtras:
    def test_a_message_names_what_the_extra_brings(self):
        extras = PROJECT["optional-dependencies"]
        assert {name: text.replace("'", "").split() for name, text in EXTRAS.items()} == {
            name: extras[name] for name in EXTRAS
        }

    def test_no_command_installs_jsg_from_a_registry_that_does_not_have_it(self):
        """Nobody has published the name, so `pip install` would fail, or install what a stranger publishes as it."""
        command = re.compile(r"install\b[^\n`]*[ '\"]jsg(\[|['\"`\n]|$)")
        assert [name for name, text in texts().items() if command.search(text)] == []
        assert command.search("pip install 'jsg[" + "cuda]'") and command.search("pip install jsg\n")

    def test_the_extras_of_commands_exist(self):
        named = {
            extra
            for text in texts().values()
            for found in re.findall(r"install\b[^\n`]*'\.\[([\w,-]+)\]'", text)
            for extra in found.split(",")
        }
        assert {"cuda", "cuda12", "ray", "dspy"} <= named <= PROJECT["optional-dependencies"].keys()
