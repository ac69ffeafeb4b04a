"""A newcomer's first minutes: the real model answers the official OpenAI client, streamed and not."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
STORY = [{"role": "user", "content": "Tell me a short story about a lighthouse keeper and her dog."}]


def plain(server, messages, **params):
    answer = server.client.chat.completions.create(
        model=server.model, messages=messages, temperature=0, **{"max_tokens": 40, **params}
    )
    return answer.choices[0].message.content, answer.choices[0].finish_reason, counts(answer.usage)


def streamed(server, messages, **params):
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"model": server.model, "messages": messages, "temperature": 0, "max_tokens": 40, **stream, **params}
    chunks = list(server.client.chat.completions.create(**body))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    [reason] = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    return text, reason, counts(chunks[-1].usage)


def counts(usage):
    """What must be equal however an answer is fetched; cached tokens depend on who asked before."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_the_capital_of_france_is_paris(server):
    text, reason, usage = streamed(server, FRANCE)
    assert "Paris" in text
    assert (text, reason, usage) == plain(server, FRANCE)
    assert reason == "stop"
    prompt_tokens, completion_tokens, total_tokens = usage
    assert total_tokens == prompt_tokens + completion_tokens


@pytest.mark.parametrize("params", [{}, {"stop": ["keeper", "\n\n"]}, {"max_tokens": 1}, {"max_tokens": 7}], ids=str)
def test_streamed_equals_plain(server, params):
    text, reason, usage = streamed(server, STORY, **params)
    assert (text, reason, usage) == plain(server, STORY, **params)
    assert reason == ("stop" if "stop" in params else "length")


def test_many_at_once_equal_one_alone(server):
    """Eight requests on four slots: some wait, all answers are as if each were alone."""
    prompts = [[{"role": "user", "content": f"Count from {n} to {n + 5}."}] for n in range(8)]
    alone = [plain(server, p, max_tokens=12)[0] for p in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda p: streamed(server, p, max_tokens=12)[0], prompts))
    assert together == alone


def test_completions_continue_a_text(server):
    params = {"model": server.model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    text = server.client.completions.create(**params).choices[0].text
    chunks = server.client.completions.create(**params, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert "Paris" in text


def test_several_answers_are_those_of_single_requests(server):
    params = {"model": server.model, "messages": STORY, "temperature": 0.9, "max_tokens": 12}
    answers = server.client.chat.completions.create(**params, n=3, seed=5).choices
    alone = [server.client.chat.completions.create(**params, seed=5 + i).choices[0] for i in range(3)]
    assert [answer.message.content for answer in answers] == [answer.message.content for answer in alone]
    assert len({answer.message.content for answer in answers}) > 1


def test_a_prompt_can_be_rated_without_an_answer(server):
    def rate(prompt):
        params = {"model": server.model, "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
        [choice] = server.client.completions.create(**params).choices
        assert choice.text == "".join(choice.logprobs.tokens) == prompt
        assert choice.logprobs.token_logprobs[0] is None
        return choice.logprobs.token_logprobs[-1]

    assert rate("The capital of France is Paris") > rate("The capital of France is Berlin")


def test_a_seed_repeats_an_answer(server):
    def answer(seed):
        return server.client.chat.completions.create(
            model=server.model, messages=STORY, temperature=1.0, top_p=0.95, seed=seed, max_tokens=16
        ).choices[0].message.content  # fmt: skip

    assert answer(7) == answer(7) != answer(8)


def test_models_health_and_metrics(server):
    [model] = server.client.models.list().data
    assert model.id == server.model == "smollm2-135m-instruct"
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.metric("vllm:generation_tokens_total") > 0
    assert server.metric("vllm:num_requests_running") == 0


def test_more_tokens_than_the_context_holds_are_cut_in_chats_and_refused_in_completions(server):
    answer = server.client.chat.completions.create(
        model=server.model, messages=FRANCE, temperature=0, max_tokens=100_000
    )
    assert "Paris" in answer.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="100,000"):
        server.client.completions.create(model=server.model, prompt="Paris is", max_tokens=100_000)


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"model": "gpt-9"}, 404, "gpt-9"),
        ({"messages": []}, 400, "messages"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"temperature": 9}, 400, "temperature"),
        ({"messages": [{"role": "user", "content": "word " * 9_000}]}, 400, "tokens"),
    ],
    ids=str,
)
def test_bad_requests_get_one_clear_sentence(server, changes, status, words):
    body = {"model": server.model, "messages": FRANCE, "max_tokens": 4} | changes
    with pytest.raises(openai.APIStatusError) as caught:
        server.client.chat.completions.create(**body)
    assert caught.value.status_code == status
    assert words in caught.value.body["message"]
    assert "Paris" in plain(server, FRANCE)[0], "a good request must still be answered"


def test_malformed_json_is_a_400(server):
    response = httpx.post(f"{server.url}/v1/chat/completions", content=b'{"model": ')
    assert response.status_code == 400 and response.json()["error"]["message"]
