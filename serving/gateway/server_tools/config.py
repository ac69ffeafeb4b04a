"""ServerTools: the tools that the gateway runs, from a TOML file that is read once, at start.

max_rounds = 4                     # times that one answer may stop for tools; the next part gets none

[[tool]]
name = "weather"
description = "The weather in a city now."
url = "http://127.0.0.1:9100/weather"        # gets the arguments by POST as JSON, its answer's body is the result
timeout_s = 5.0
headers = { authorization = "Bearer ..." }
[tool.parameters]                  # JSON schema of the arguments
type = "object"
properties.city.type = "string"
required = ["city"]
"""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from serving.errors import ConfigError, InvalidRequest
from serving.gateway.parse import describe
from serving.gateway.tools import MAX_TOOLS, NAME

FIELD = "server_tools"


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerTool(_Frozen):
    name: Annotated[str, Field(pattern=NAME)]
    url: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; None for no arguments."""
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    headers: dict[str, str] = {}

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ValueError("must begin with http:// or https://")
        return url

    @field_validator("timeout_s")
    @classmethod
    def _is_finite(cls, timeout_s: float) -> float:
        if not math.isfinite(timeout_s):
            raise ValueError("must be finite")
        return timeout_s

    def to_chat(self) -> dict[str, Any]:
        """As a chat's body would offer it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ServerTools(_Frozen):
    max_rounds: Annotated[int, Field(ge=1, le=100)] = 4
    tool: Annotated[tuple[ServerTool, ...], Field(max_length=MAX_TOOLS)] = ()

    def offer(self, fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, ServerTool]]:
        """A chat's fields with the server's tools beside the client's, and those that were added, by name.

        All are offered, or those that the field `server_tools` names. A tool of the client's own hides one of the same
        name. Raises InvalidRequest for a name that is not known.
        """
        wanted = self._wanted(fields.get(FIELD))
        own = fields.get("tools") or []
        if not wanted or not isinstance(own, list) or fields.get("tool_choice") == "none":
            return dict(fields), {}
        taken = {name for name in map(_name_of, own) if isinstance(name, str)}  # others are for the body's own checks
        added = {tool.name: tool for tool in wanted if tool.name not in taken}
        return {**fields, "tools": [*own, *(tool.to_chat() for tool in added.values())]}, added

    def _wanted(self, names: Any) -> list[ServerTool]:
        """What is no list of names is for the body's own checks."""
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return [] if names is not None else list(self.tool)
        known = {tool.name: tool for tool in self.tool}
        for name in names:
            if name not in known:
                raise InvalidRequest(
                    f"{FIELD} names {name!r}; this gateway runs {', '.join(known) or 'none'}.", param=FIELD
                )
        return [known[name] for name in dict.fromkeys(names)]


NO_TOOLS = ServerTools()


def _name_of(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def read_server_tools(path: str | None) -> ServerTools:
    """Raises ConfigError that names the file and the first thing that is wrong with it."""
    if path is None:
        return NO_TOOLS
    try:
        tools = ServerTools.model_validate(tomllib.loads(Path(path).read_text()))
    except OSError as error:
        raise ConfigError(f"the tools file {path} cannot be read: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the tools file {path} is not TOML: {error}.") from error
    except ValidationError as error:
        raise ConfigError(f"the tools file {path}: {describe(error)}") from error
    names = [tool.name for tool in tools.tool]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"the tools file {path} has two tools of the name {name!r}.")
    return tools
