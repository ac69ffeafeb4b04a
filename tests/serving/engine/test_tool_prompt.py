"""Tools in the words of a template that knows none."""

from serving.engine.tool_prompt import describe_tools

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}


def test_tools_are_added_to_the_system_message_or_make_one():
    user = {"role": "user", "content": "hi"}
    system = {"role": "system", "content": "Be kind."}
    told, *rest = describe_tools([system, user], [TOOL])
    assert told["content"].startswith("Be kind.\n\n") and '"name": "look"' in told["content"] and rest == [user]
    made, *rest = describe_tools([user], [TOOL])
    assert made["role"] == "system" and "<tool_call>" in made["content"] and rest == [user]


def test_calls_and_results_become_text():
    messages = [
        {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    _, call, result = describe_tools(messages, [TOOL])
    assert call["content"] == 'Wait.\n<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
    assert result == {"role": "user", "content": "<tool_response>\n7\n</tool_response>"}


def test_a_conversation_without_tools_stays_as_it_is():
    messages = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "7"}]
    assert describe_tools(messages, []) == messages
