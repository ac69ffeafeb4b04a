"""Requests of different adapters and of none share steps, and each gets the tokens of a model with its adapter merged
into the weights: beside others, preempted, from cached pages, while adapters come and go, split over devices."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import dense_attention
from model.config import ModelConfig
from serving.config import EngineConfig
from serving.engine.api import LoadedAdapter
from serving.engine.build import adapter_form
from serving.engine.loop import EngineThread
from serving.errors import ConfigError, InvalidRequest, ModelNotFound
from serving.request import SamplingParams
from sharding.params import bind
from tests.adapters import merged, random_tensors, save_adapter
from tests.engines import ADAPTER_RANK, CONFIG, GREEDY, request, run, tiny_engine, tiny_params

V = CONFIG.vocab_size
PROMPTS = [[(31 * n + 7 * j) % V for j in range(n)] for n in (3, 20, 45)]
LONG = SamplingParams(temperature=0.0, max_tokens=60)
QUERIES_ONLY = {"targets": ("q_proj", "v_proj")}
SPLIT = ModelConfig.tiny(num_kv_heads=1, tie_embeddings=False)


class Adapters:
    """Two adapters of different ranks and kinds, on the disk, and what the model is with each."""

    def __init__(self, folder, config=CONFIG):
        self.config = config
        tensors = (
            random_tensors(config, seed=1, rank=ADAPTER_RANK),
            random_tensors(config, seed=2, rank=2, **QUERIES_ONLY),
        )
        self.paths = [
            save_adapter(folder / "whole", tensors[0]),
            save_adapter(folder / "queries", tensors[1], lora_alpha=4, use_rslora=True),
        ]
        params, scales = tiny_params(config), (1.0, 4 / np.sqrt(2))
        self.params = [params, *(merged(params, config, *each) for each in zip(tensors, scales, strict=True))]
        self._most_likely = jax.jit(self._dense)
        self._number = 0

    def _dense(self, params, tokens):
        positions = jnp.arange(len(tokens))
        attend = dense_attention(jnp.zeros_like(positions), positions)
        return jnp.argmax(bind(self.config, params)(tokens, positions, attend)[0], axis=-1)

    def load(self, engine, place):
        """The adapter of this place, as requests name it; each time a new one."""
        engine.write_adapter(place, engine.adapters.load(self.paths[place]))
        self._number += 1
        return LoadedAdapter(f"lora-{place}", self.paths[place], place, self._number)

    def check(self, adapter, prompt, answer):
        """With its adapter merged, the model finds each token of the answer the most likely one."""
        tokens = jnp.asarray([*prompt, *answer, *[0] * (160 - len(prompt) - len(answer))])
        params = self.params[0 if adapter is None else adapter.place + 1]
        found = np.asarray(self._most_likely(params, tokens))
        assert answer == found[len(prompt) - 1 :][: len(answer)].tolist()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    return Adapters(tmp_path_factory.mktemp("adapters"))


def requests(choices, sampling=GREEDY):
    """Each prompt with each of the choices."""
    return [
        request(f"{place}-{choice and choice.name}", prompt, sampling, adapter=choice)
        for place, prompt in enumerate(PROMPTS)
        for choice in choices
    ]


def check_all(adapters, asked, answers):
    for each in asked:
        answer, _ = answers[each.request_id]
        assert len(answer) == each.sampling.max_tokens
        adapters.check(each.adapter, each.token_ids, answer)


@pytest.mark.slow
def test_a_mixed_batch_equals_merged_weights_and_each_alone(adapters):
    engine = tiny_engine(adapters=True)
    choices = [None, *(adapters.load(engine, place) for place in range(2))]
    asked = requests(choices)
    answers = run(engine, asked)
    check_all(adapters, asked, answers)
    assert len({tuple(answers[each.request_id][0]) for each in asked[3:6]}) == 3, "an adapter changes nothing"
    assert run(tiny_engine(adapters=True, overlap=False, trips=1), asked[::-1], arrive_every=5) == answers
    plain = [each for each in asked if each.adapter is None]
    assert run(tiny_engine(), plain) == {each.request_id: answers[each.request_id] for each in plain}


def test_preempted_equals_undisturbed(adapters):
    engine = tiny_engine(adapters=True, num_pages=44)
    asked = requests([None, *(adapters.load(engine, place) for place in range(2))], LONG)
    check_all(adapters, asked, run(engine, asked))
    assert engine.stats.num_preemptions > 0


def test_cached_pages_are_those_of_the_same_load_of_the_same_adapter(adapters):
    """Also under the same salt, and where an adapter is loaded again into its place."""
    engine = tiny_engine(adapters=True)
    first = [None, *(adapters.load(engine, place) for place in range(2))]
    prompt, hits = PROMPTS[2], []
    for choice in (*first, *first, adapters.load(engine, 0)):
        before = engine.stats.prefix_cache_hits
        [(answer, _)] = run(engine, [request("x", prompt, adapter=choice, cache_salt="1")]).values()
        adapters.check(choice, prompt, answer)
        hits.append(engine.stats.prefix_cache_hits - before)
    assert hits == [0, 0, 0, 44, 44, 44, 0]


def test_an_adapter_that_is_written_beside_running_answers_changes_none(adapters):
    """Steps that are in flight then see the old numbers or the new ones: of a place that nobody uses."""
    engine = tiny_engine(adapters=True)
    choice = adapters.load(engine, 0)
    running = [request(f"{name}", PROMPTS[1], LONG, adapter=adapter) for name, adapter in (("a", choice), ("b", None))]
    answers = {each.request_id: [] for each in running}
    for each in running:
        engine.submit(each)
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        adapters.load(engine, 1)
    for each in running:
        adapters.check(each.adapter, each.token_ids, answers[each.request_id])


def test_loaded_through_the_thread_that_serves(adapters, tmp_path):
    """Before it starts and while it runs; what cannot be loaded is told to who asked, and nobody else notices."""
    loop = EngineThread(tiny_engine(adapters=True), lambda: 0, tmp_path)
    assert loop.num_adapters == 2
    loop.load_adapter(0, adapters.paths[0])
    done, told = threading.Event(), []

    def on_step(step):
        told.extend(step.news)
        if any(output.finish_reason for output in step.news):
            done.set()

    def answer(choice):
        told.clear()
        done.clear()
        loop.submit(request("x", PROMPTS[1], LONG, adapter=choice))
        assert done.wait(30)
        return [token for output in told for token in output.token_ids]

    loop.start(on_step)
    try:
        choices = [LoadedAdapter("a", adapters.paths[0], 0, 101), LoadedAdapter("b", adapters.paths[1], 1, 102)]
        adapters.check(choices[0], PROMPTS[1], answer(choices[0]))
        loop.load_adapter(1, adapters.paths[1])
        adapters.check(choices[1], PROMPTS[1], answer(choices[1]))
        with pytest.raises(ModelNotFound, match="there is no adapter at /nowhere"):
            loop.load_adapter(1, "/nowhere")
        broken = save_adapter(tmp_path / "broken", random_tensors(CONFIG, seed=1, rank=2), use_dora=True)
        with pytest.raises(InvalidRequest, match="use_dora is true"):
            loop.load_adapter(1, broken)
        adapters.check(choices[1], PROMPTS[1], answer(choices[1]))
    finally:
        loop.stop()


def test_several_hosts_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="served by one host only; leave out --lora and --max-loras"):
        adapter_form(EngineConfig("x", max_loras=1), CONFIG, None, None, "float32")
    assert adapter_form(EngineConfig("x"), CONFIG, None, None, "float32") is None


@pytest.mark.slow
def test_guesses_are_checked_with_the_adapter(adapters):
    engine = tiny_engine(adapters=True, drafts=3)
    asked = requests([None, *(adapters.load(engine, place) for place in range(2))], LONG)
    check_all(adapters, asked, run(engine, asked))
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


@pytest.mark.slow
def test_split_over_devices_equals_merged_weights(tmp_path):
    """Over tensor and stage, where each KV head lies on two devices."""
    adapters, engine = Adapters(tmp_path, SPLIT), tiny_engine(model=SPLIT, mesh="stage=2,tensor=2", adapters=True)
    asked = requests([None, *(adapters.load(engine, place) for place in range(2))])
    check_all(adapters, asked, run(engine, asked))
