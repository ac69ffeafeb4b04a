"""AccessRules: which Host names and which pages' Origins are served, decided from a request's headers alone.

A web page may reach what its reader's machine reaches. Two things keep strangers' pages away: their Origin is not ours
(they cannot leave it out), and a name of theirs that they let point at our address (DNS rebinding) is no Host of ours.
An address or a loopback name cannot be rebound. Who listens on loopback is known by such names alone, so others are
refused; who listens elsewhere is known by names that nobody told it, so any passes, until some are named.
"""

import ipaddress
import re
from dataclasses import dataclass

from starlette.datastructures import Headers

from serving.config import ANY, GatewayConfig, is_loopback
from serving.errors import InvalidRequest, RequestError

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+)(:\d*)?")


class AccessRefused(RequestError):
    http_status, code = 403, "access_refused"


class WrongMediaType(RequestError):
    http_status, code = 415, "unsupported_media_type"


@dataclass(frozen=True, slots=True)
class AccessRules:
    on_loopback: bool
    hosts: frozenset[str]
    origins: frozenset[str]

    @classmethod
    def of(cls, config: GatewayConfig) -> "AccessRules":
        lower = (frozenset(map(str.lower, names)) for names in (config.allow_hosts, config.allow_origins))
        return cls(is_loopback(config.host), *lower)

    def check(self, method: str, headers: Headers, http_version: str = "1.1") -> None:
        """Raises InvalidRequest, AccessRefused or WrongMediaType, whose sentence says what would let it pass."""
        hosts = headers.getlist("host")
        if len(hosts) > 1 or (not hosts and http_version not in ("0.9", "1.0")):
            raise InvalidRequest(f"a request has one Host header (RFC 9112, 3.2), this one has {len(hosts)}.")
        if hosts and not self.serves_host(name := _name_of(hosts[0])):
            raise AccessRefused(
                f"this server does not know itself as {name[:100]!r}; `--allow-host {name[:100]}` makes it known."
            )
        origin = headers.get("origin")
        if origin is not None and not self.allows_origin(origin, hosts[0] if hosts else ""):
            raise AccessRefused(
                f"pages from {origin[:100]!r} may not ask this server; `--allow-origin {origin[:100]}` lets them."
            )
        if origin is None and self._is_embedded(method, headers):
            raise AccessRefused("pages from elsewhere may not ask this server; `--allow-origin` says which may.")
        _check_content(method, headers, is_browser=origin is not None or "sec-fetch-site" in headers)

    def serves_host(self, name: str) -> bool:
        """`name` without its port, in lower case."""
        if name in self.hosts or ANY in self.hosts or is_loopback(name):
            return True
        return not self.on_loopback and (not self.hosts or _is_address(name))

    def allows_origin(self, origin: str, host: str = "") -> bool:
        """One that is named; or, where nothing else can lie behind its name: a loopback's for who listens there, and
        the one of `host`, as the request has it."""
        origin = origin.lower()
        if origin in self.origins or ANY in self.origins:
            return True
        scheme, _, authority = origin.partition("://")
        if scheme not in ("http", "https"):
            return False
        name = _name_of(authority)
        if self.on_loopback and is_loopback(name):
            return True
        return authority == host.lower() and (name in self.hosts or _is_address(name) or is_loopback(name))

    def _is_embedded(self, method: str, headers: Headers) -> bool:
        """Asked by another site's page without an Origin, as an image is; following a link is its reader's will."""
        if headers.get("sec-fetch-site") != "cross-site" or ANY in self.origins:
            return False
        return not (method in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate")


def _check_content(method: str, headers: Headers, *, is_browser: bool) -> None:
    """Of a browser, JSON must call itself so: it asks before it sends that, while it sends text to anyone."""
    encodings = [headers.get("content-encoding", ""), headers.get("transfer-encoding", "").replace("chunked", "")]
    for encoding in encodings:
        if encoding.strip(" ,").lower() not in ("", "identity"):
            raise WrongMediaType(f"a body encoded as {encoding.strip(' ,')[:50]!r} is not read here; send it as it is.")
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    if is_browser and has_body and method not in ("GET", "HEAD", "OPTIONS"):
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise WrongMediaType(f"a browser's body must be of type application/json, this one is {kind[:100]!r}.")


def _name_of(authority: str) -> str:
    """Without its port, in lower case. Raises InvalidRequest for what is no host."""
    if not (match := _HOST.fullmatch(authority)):
        raise InvalidRequest(f"{authority[:100]!r} is not the name of a host.")
    return match[1].lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
