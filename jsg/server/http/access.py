"""Who may enter: API keys → callers."""

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from starlette.responses import Response
from starlette.types import Scope

from jsg.config import ServerConfig
from jsg.errors import ConfigError
from jsg.option_sources import read_keys
from jsg.server.caller import Caller, state_of
from jsg.server.http.failures import failure_response

PROBES = frozenset({"/health", "/ready"})  # they carry no key
BEARER = b"bearer "


@final
class KeyRing:
    """The keys of a server. Without any key everybody is the same caller and may do everything.

    How long a refusal takes tells nothing about a key: a given key is compared with all keys, each as a digest of one
    length under a secret of this process.
    """

    def __init__(self, keys: Sequence[str], admin_key: str | None, names: Mapping[str, str] | None = None) -> None:
        """Takes the users' keys and the admin's, and the names of keys; others are called by their number.

        Without an admin key a single user is the admin; of several users none is; and where there is no key at all,
        everybody is. With an admin key and no other, everybody may come in, and only the admin's key makes an admin.
        A single user has the tenant of a server without keys, so that routers find its prefixes by their tokens alone.
        """
        self._secret = secrets.token_bytes(32)
        is_only = len(keys) == 1
        self._callers = [
            (
                self._digest(key.encode()),
                Caller(
                    "" if is_only else _tenant(key),
                    is_admin=admin_key is None and is_only,
                    key=(names or {}).get(key, f"key-{number}"),
                ),
            )
            for number, key in enumerate(keys, 1)
        ]
        if admin_key is not None:
            caller = Caller(_tenant(admin_key), is_admin=True, key="admin")
            self._callers.append((self._digest(admin_key.encode()), caller))
        self._anybody = None if keys else Caller("", is_admin=admin_key is None)

    @classmethod
    def of(cls, config: ServerConfig) -> "KeyRing":
        """The keys of `--api-key`, `--api-key-file` and `--admin-api-key`.

        Raises:
            ConfigError: A key that is empty, has characters that a header cannot carry or is given twice; a file that
                cannot be read, holds no key, or may be written by others.
        """
        keys, names = [_checked("--api-key", key) for key in config.api_key], dict[str, str]()
        if config.api_key_file is not None:
            for name, key in read_keys(Path(config.api_key_file)):
                keys.append(_checked("--api-key-file", key))
                if name:
                    names[key] = name
        admin_key = None if config.admin_api_key is None else _checked("--admin-api-key", config.admin_api_key)
        everybodys = keys if admin_key is None else [*keys, admin_key]
        if len(set(everybodys)) < len(everybodys):
            raise ConfigError(
                "each key must be given once, for one user or for the admin, but one is given twice; leave one out"
            )
        return cls(keys, admin_key, names)

    @property
    def num_callers(self) -> int:
        """How many different callers there can be."""
        return len(self._callers) + (self._anybody is not None)

    @property
    def has_several_users(self) -> bool:
        """Whether there are users who must not learn of each other's requests."""
        return len({caller.tenant for _, caller in self._callers if not caller.is_admin}) > 1

    def caller(self, key: bytes | None) -> Caller | None:
        """The caller who has this key; None when nobody has it. Takes the same time for every key."""
        digest, found = self._digest(key or b""), self._anybody
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, "sha256")


def open_paths(config: ServerConfig) -> frozenset[str]:
    """The paths that need no key."""
    return PROBES | {"/metrics"} if config.open_metrics else PROBES


def has_keys(config: ServerConfig) -> bool:
    """Whether users need a key."""
    return bool(config.api_key) or config.api_key_file is not None


def _tenant(key: str) -> str:
    return hashlib.sha256(b"jsg tenant\0" + key.encode()).hexdigest()[:16]


def _checked(option: str, key: str) -> str:
    if not key or not all("!" <= char <= "~" for char in key):
        raise ConfigError(
            f"a key of {option} must be printable ASCII without spaces, and not empty; choose another, such as what "
            "'openssl rand -hex 32' prints"
        )
    return key


@final
class RequireKey:
    """Lets a request through with `Authorization: Bearer KEY` or `x-api-key: KEY`; open paths need none."""

    def __init__(self, keys: KeyRing, open_paths: frozenset[str]) -> None:
        self._keys = keys
        self._open_paths = open_paths

    def refusal(self, scope: Scope) -> Response | None:
        """The response to a request that carries no valid key; otherwise notes its caller."""
        caller = self._keys.caller(_given_key(scope))
        if caller is None and scope["path"] not in self._open_paths:
            message = (
                "a request must carry a key, but this one has none or a wrong one; send 'Authorization: Bearer KEY'"
            )
            return failure_response(scope, 401, message, {"WWW-Authenticate": "Bearer"})
        state_of(scope)["caller"] = caller or Caller("", is_admin=False)
        return None


def _given_key(scope: Scope) -> bytes | None:
    """The key that a request carries; None when it has none, or different ones."""
    given = {key for name, value in scope["headers"] if (key := _key_of(name, value)) is not None}
    return given.pop() if len(given) == 1 else None


def _key_of(name: bytes, value: bytes) -> bytes | None:
    if name == b"x-api-key":
        return value.strip()
    if name == b"authorization" and value[: len(BEARER)].lower() == BEARER:
        return value[len(BEARER) :].strip()
    return None
