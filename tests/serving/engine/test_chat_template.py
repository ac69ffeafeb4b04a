import json

import pytest

from serving.engine.chat_template import ChatTemplate
from serving.errors import InvalidRequest

USER = [{"role": "user", "content": "<hi> & 'you'"}]


def render(source, messages=USER, *, add_generation_prompt=True, **tokens):
    return ChatTemplate(source, tokens).render(messages, add_generation_prompt=add_generation_prompt)


def test_blocks_leave_no_blank_lines():
    source = "{% for message in messages %}\n    {% if true %}\n{{ message.content }}\n    {% endif %}\n{% endfor %}\n"
    assert render(source) == "<hi> & 'you'\n"


def test_json_is_not_escaped_for_web_pages():
    assert render("{{ messages | tojson }}") == """[{"role": "user", "content": "<hi> & 'you'"}]"""
    assert render("{{ {'b': 'é', 'a': 1} | tojson(indent=2, sort_keys=true) }}") == '{\n  "a": 1,\n  "b": "é"\n}'


def test_tokens_the_prompt_flag_and_absent_things():
    source = "{{ bos_token }}{% if add_generation_prompt %}go{% endif %}{{ tools is none }}{{ eos_token }}"
    assert render(source, bos_token="<s>") == "<s>goTrue"
    assert render(source, add_generation_prompt=False, bos_token="<s>", eos_token="</s>") == "<s>True</s>"


def test_loop_controls_dates_and_training_marks():
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{{ strftime_now('%Y') }}").isdigit()
    assert render("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c") == "abuserc"


CUT = '{"city": "Os'
WRITE_CALL = {  # how the templates of these models write a call
    "Qwen 2.5": ("{{- '<tool_call>\\n{\"name\": \"' }}{{- call.function.name }}{{- '\", \"arguments\": ' }}"
                 "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}",
                 '<tool_call>\n{"name": "look", "arguments": ' + json.dumps(CUT) + "}\n</tool_call>"),
    "Qwen 3": ("<tool_call>{%- if call.function.arguments is string %}{{- call.function.arguments }}"
               "{%- else %}{{- call.function.arguments | tojson }}{%- endif %}", "<tool_call>" + CUT),
    "Llama 3.1": ("{{- '{\"name\": \"' + call.function.name + '\", ' }}{{- '\"parameters\": ' }}"
                  "{{- call.function.arguments | tojson }}{{- '}' }}",
                  '{"name": "look", "parameters": ' + json.dumps(CUT) + "}"),
    "Mistral": ("[TOOL_CALLS] [{{- call.function | tojson }}]",
                "[TOOL_CALLS] [" + json.dumps({"name": "look", "arguments": CUT}) + "]"),
    "Gemma": ("call:{{ call.function.name }}{ {%- if call.function.arguments is mapping %}"
              "{%- for key, value in call.function.arguments | dictsort %}{{ key }}:{{ value }}{%- endfor %}"
              "{%- elif call.function.arguments is string %}{{ call.function.arguments }}{%- endif %}}",
              "call:look{" + CUT + "}"),
    "GLM 4.5": ("{% set _args = call.function.arguments %}{% for k, v in _args.items() %}"
                "<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}"
                "</arg_value>{% endfor %}", "<arg_key>arguments</arg_key><arg_value>" + CUT + "</arg_value>"),
    "Qwen 3 Coder": ("{%- for name, value in call.function.arguments | items %}<parameter={{ name }}>{{ value }}"
                     "</parameter>{%- endfor %}", "<parameter=arguments>" + CUT + "</parameter>"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITE_CALL)
def test_a_call_that_was_cut_is_shown_as_the_text_it_was(name):
    """Other calls are written as ever, also where the template needs names."""
    write, shown = WRITE_CALL[name]
    around = "{# tools #}{% for call in messages[1].tool_calls %}", "{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": CUT}}
    assert render(write.join(around), [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]) == shown
    whole = {**call, "function": {"name": "look", "arguments": {"city": "Oslo"}}}
    alone = render(write.join(around), [*USER, {"role": "assistant", "content": "", "tool_calls": [whole]}])
    both = render(write.join(around), [*USER, {"role": "assistant", "content": "", "tool_calls": [whole, call]}])
    assert both == alone + shown


def test_the_templates_own_words_reach_the_client():
    source = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('A system message must come first.') }}{% endif %}"
    )
    with pytest.raises(InvalidRequest, match="refuses the messages: A system message must come first") as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.missing.deeper }}", "{{ messages[0].content + 1 }}", "{{ messages[0] + messages }}",
        "{{ 1 / 0 }}", "{% if %}", "{{ messages | nonsense }}", "{{ messages[7].content.x }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ raise_exception() }}",
        "{{ messages.append(1) }}", "{{ ().__class__.__mro__[1].__subclasses__() }}", "{{ range(99999999) | list }}",
    ],
)  # fmt: skip
def test_whatever_a_template_does_is_an_invalid_request(source):
    with pytest.raises(InvalidRequest, match=r"refuses the messages: .*\.$"):
        render(source)
