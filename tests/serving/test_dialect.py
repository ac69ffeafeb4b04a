import pytest

from serving.dialect import ToolDialect, begins_in_thought, choose_tool_dialect, thinks


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        (None, ToolDialect.NONE),
        ("{{ messages[0].content }}", ToolDialect.HERMES),
        ("{% if tools %}<tool_call>{% endif %}", ToolDialect.HERMES),
        ("{% if tools %}<tool_call><function=x>{% endif %}", ToolDialect.NONE),
        ('{% if tools %}{"name": x, "parameters": y}<|python_tag|>{% endif %}', ToolDialect.LLAMA3),
        ("{% if tools %}{{ '\"parameters\": ' }}{% endif %}", ToolDialect.LLAMA3),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", ToolDialect.MISTRAL),
        ("{% if tools %}<start_function_call>{% endif %}", ToolDialect.GEMMA),
        ("{% if tools %}<|tool_call>{% endif %}", ToolDialect.GEMMA),
        ("{% if tools %}something else{% endif %}", ToolDialect.NONE),
    ],
)
def test_a_template_tells_how_tools_are_called(template, dialect):
    assert choose_tool_dialect(template) is dialect


def test_a_template_tells_whether_the_model_thinks():
    assert thinks("{% if x %}</think>{% endif %}")
    assert not thinks("{{ x }}") and not thinks(None)


def test_a_prompt_may_open_the_thought():
    assert begins_in_thought("<|assistant|><think>\n")
    assert not begins_in_thought("<|assistant|><think>\n\n</think>\n\n")
