"""The file of the server's tools: read once, and what is wrong with it said in a sentence."""

import pytest

from serving.errors import ConfigError
from serving.gateway.server_tools.config import ServerTools, read_server_tools

GOOD = """
max_rounds = 2
[[tool]]
name = "weather"
description = "The weather in a city."
url = "https://tools.example/weather"
timeout_s = 3
headers = { authorization = "Bearer x" }
[tool.parameters]
type = "object"
properties.city.type = "string"
required = ["city"]
"""


def read(tmp_path, text):
    path = tmp_path / "tools.toml"
    path.write_text(text)
    return read_server_tools(str(path))


def test_a_file_becomes_one_frozen_tree(tmp_path):
    tools = read(tmp_path, GOOD)
    (tool,) = tools.tool
    assert (tools.max_rounds, tool.name, tool.timeout_s) == (2, "weather", 3.0)
    assert tool.to_chat()["function"]["parameters"]["required"] == ["city"]
    assert read_server_tools(None) == ServerTools() == read(tmp_path, "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[tool]", "is not TOML"),
        ("max_rounds = 0", "max_rounds"),
        ("rounds = 3", "'rounds' is not known"),
        (GOOD.replace("weather", "the weather"), "tool[0].name"),
        (GOOD.replace("https:", "ftp:"), "tool[0].url: must begin with http"),
        (GOOD.replace("= 3", "= inf"), "tool[0].timeout_s"),
        (GOOD.replace("= 3", "= -1"), "tool[0].timeout_s"),
        (GOOD.replace("url", "uri"), "tool[0].url' is missing"),
        (GOOD + GOOD.replace("max_rounds = 2", ""), "two tools of the name 'weather'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, words):
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    assert words in str(refused.value) and "tools.toml" in str(refused.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_server_tools(str(tmp_path / "none.toml"))


@pytest.mark.parametrize("name", [["a"], {"a": 1}, 3, None])
def test_a_clients_tool_of_no_proper_name_is_left_to_the_bodys_own_checks(tmp_path, name):
    own = {"type": "function", "function": {"name": name}}
    offered, added = read(tmp_path, GOOD).offer({"tools": [own]})
    assert (len(offered["tools"]), list(added)) == (2, ["weather"])
