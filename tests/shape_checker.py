"""What checks the shapes and types in signatures while the tests run (`--jaxtyping-packages` in pyproject.toml)."""

from beartype import BeartypeConf, beartype

# By default beartype looks at an item of a list that `random` picks. Then a verdict would depend on chance, and an
# engine's thread would advance the generator whose state hypothesis compares before and after each draw.
checked = beartype(conf=BeartypeConf(is_random=False))
