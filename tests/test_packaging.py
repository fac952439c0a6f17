"""What people install: commands that work, and what a distribution holds."""

import email
import re
import subprocess
import tarfile
import tomllib
import zipfile

import pytest

from jsg.extras import EXTRAS
from tests.clients.environment import MADE, UnreachableError, make_python
from tests.conftest import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
BUILDERS = ("hatchling==1.33.0", "hatch-fancy-pypi-readme==25.1.0")
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
        assert command.search("pip install 'js" + "g[cuda]'") and command.search("pip install js" + "g\n")

    def test_the_extras_of_commands_exist(self):
        named = {
            extra
            for text in texts().values()
            for found in re.findall(r"install\b[^\n`]*'\.\[([\w,-]+)\]'", text)
            for extra in found.split(",")
        }
        assert {"cuda", "cuda12", "ray", "dspy"} <= named <= PROJECT["optional-dependencies"].keys()


RELATIVE = re.compile(r"\]\((?!https?:|mailto:)|(?:src|href)=\"(?!https?:|mailto:)")


def registry_page(readme: str) -> str:
    """README as a registry shows it: with the substitutions that the build makes."""
    for each in PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        readme = re.sub(each["pattern"], each["replacement"], readme)
    return readme


class TestRegistryPage:
    """`make test-long` builds the page itself."""

    def test_no_link_leads_nowhere(self):
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        assert RELATIVE.search(text), "the test has nothing to do"
        page = registry_page(text)
        assert RELATIVE.findall(page) == []
        assert page.count("http") == text.count("http")

    def test_code_stays_as_it_is(self):
        blocks = [re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL) for text in self.both()]
        assert blocks[0] and blocks[0] == blocks[1]

    def both(self) -> tuple[str, str]:
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        return text, registry_page(text)

    def test_the_words_of_a_link_stay(self):
        text = "A [`jsg/x`](docs/x.md#y), [z](https://z.example/a), [b](#b).\n\n![P](docs/p.png)\n\n## B\n"
        assert registry_page(text) == "A `jsg/x`, [z](https://z.example/a), b.\n\n## B\n"


def test_a_source_distribution_has_no_tests_that_could_not_run():
    """They need the whole repository: benchmarks, deployments, pages and the index of git."""
    included = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert included == ["/jsg", "/CHANGELOG.md", "/README.md", "/constraints.txt"]


@pytest.mark.long  # it installs the builder from a registry
class TestBuilt:
    @pytest.fixture(scope="class")
    @classmethod
    def built(cls, tmp_path_factory):
        """The members of the source distribution, the wheel that is made of it, and the wheel's description."""
        out = tmp_path_factory.mktemp("dist")
        try:
            programs = make_python(MADE / "build", BUILDERS)
        except UnreachableError as error:
            pytest.skip(str(error))

        def build(folder, *targets):
            command = [programs / "python", "-m", "hatchling", "build", "-d", out, *targets]
            subprocess.run(command, cwd=folder, check=True, timeout=300)

        build(ROOT, "-t", "sdist")
        [source] = out.glob("*.tar.gz")
        with tarfile.open(source) as archive:
            archive.extractall(out, filter="data")
        build(out / source.name.removesuffix(".tar.gz"), "-t", "wheel")
        return out / source.name.removesuffix(".tar.gz"), zipfile.ZipFile(next(out.glob("*.whl")))

    def test_a_wheel_made_of_the_source_distribution_has_the_whole_package(self, built):
        listed = subprocess.run(["git", "ls-files", "jsg"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert {name for name in built[1].namelist() if name.startswith("jsg/")} == set(listed.splitlines())

    def test_a_source_distribution_is_what_the_wheel_is_made_of(self, built):
        assert {path.name for path in built[0].iterdir()} == {
            *("jsg", "CHANGELOG.md", "constraints.txt", "README.md", "LICENSE"),
            *("pyproject.toml", "PKG-INFO", ".gitignore"),
        }

    def test_the_page_has_no_link_that_leads_nowhere(self, built):
        [name] = [name for name in built[1].namelist() if name.endswith("/METADATA")]
        metadata = email.message_from_bytes(built[1].read(name))
        assert metadata["Description-Content-Type"] == "text/markdown" and metadata["Author"] == "The jsg authors"
        assert RELATIVE.findall(metadata.get_payload()) == []
