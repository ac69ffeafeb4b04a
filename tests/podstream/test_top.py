"""The live view against a scripted gateway, and the figures that it shows by hand."""

import io

import httpx
import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from podstream.figures import figures
from podstream.scrape import Scrape, quantile
from podstream.top import Top, TopFailed
from serving.gateway.replica_collector import ReplicaCollector
from serving.metrics import Metrics
from serving.replica.status import ReplicaState, ReplicaStatus
from serving.request import FinishReason, Load, Usage

LABELS = '{model_name="m",engine="0"}'


def page(**values):
    return "".join(f"{name.replace('__', ':')}{LABELS} {value}\n" for name, value in values.items())


def scrape(at_s, **values):
    return Scrape.read(page(**values), at_s)


class Service:
    """A gateway whose replica is always up, and whose clock and counters advance with every look."""

    def __init__(self):
        self.metrics = Metrics(CollectorRegistry())
        self.collector = ReplicaCollector("127.0.0.1:9000")
        self.metrics.registry.register(self.collector)
        self.looks = 0
        self.fail_at = {}

    def __call__(self, request):
        assert request.url.path == "/metrics"
        self.looks += 1
        if error := self.fail_at.get(self.looks):
            raise error
        status = ReplicaStatus(ReplicaState.READY, "m", load=Load(3, 2, 5, 8, 25, 100, 16))
        self.collector.update(status, up=True)
        model = self.metrics.of_model("m")
        model.first_token(0.03)
        model.next_tokens(0.02, 1)
        model.finish(FinishReason.STOP, 0.5, Usage(10, 20))
        return httpx.Response(200, content=self.metrics.render())


def watch(service, looks):
    """What stands on the terminal after some looks, then Ctrl-C."""
    clock = iter(range(1000))
    pauses = iter([*[None] * looks, KeyboardInterrupt()])

    def pause(_):
        if error := next(pauses):
            raise error

    console = Console(file=io.StringIO(), width=110, force_terminal=False)
    top = Top(
        "http://service/v1/", console, transport=httpx.MockTransport(service), now=lambda: next(clock), pause=pause
    )
    top.run()
    return console.file.getvalue()


def test_the_screen_shows_how_full_and_how_fast():
    screen = watch(Service(), 3)
    assert "http://service · m" in screen
    assert "3 of 8" in screen
    assert "75 of 100, 16 tokens each" in screen
    assert "p50 30.0 ms" in screen
    assert "ready" in screen


def test_a_gateway_that_goes_away_is_said_and_watched_on():
    service = Service()
    service.fail_at = {3: httpx.ConnectError("refused")}
    assert "nothing answers at http://service" in watch(service, 2)
    assert "3 of 8" in watch(service, 4)


def test_nobody_there_is_one_clear_sentence():
    with pytest.raises(TopFailed, match=r"nothing answers at http://127\.0\.0\.1:9 .*podstream serve"):
        Top("http://127.0.0.1:9", Console(file=io.StringIO())).run()


@pytest.mark.parametrize(
    ("response", "reason"),
    [(httpx.Response(404), "answers 404"), (httpx.Response(200, text="<html>{"), "not a page of metrics")],
)
def test_something_else_there_is_one_clear_sentence(response, reason):
    with pytest.raises(TopFailed, match=reason):
        Top("http://other", Console(file=io.StringIO()), transport=httpx.MockTransport(lambda _: response)).run()


def test_a_gateway_that_tells_little_shows_dashes():
    new = scrape(1.0, process_cpu_seconds_total=3)
    assert figures(scrape(0.0), new).generated_per_s is None
    assert figures(scrape(0.0), new).host_share is None


def test_rates_are_of_the_time_between():
    old = scrape(10.0, vllm__generation_tokens_total=100, podstream__steps_total=10,
                 podstream__step_host_seconds_total=1.0, podstream__step_device_wait_seconds_total=3.0)  # fmt: skip
    new = scrape(14.0, vllm__generation_tokens_total=300, podstream__steps_total=20,
                 podstream__step_host_seconds_total=1.5, podstream__step_device_wait_seconds_total=4.5)  # fmt: skip
    now = figures(old, new)
    assert (now.generated_per_s, now.steps_per_s) == (50.0, 2.5)
    assert (now.host_s, now.device_wait_s, now.host_share) == (0.05, 0.15, 0.25)


def test_a_counter_that_started_anew_is_not_negative():
    old, new = scrape(0.0, podstream__steps_total=500), scrape(2.0, podstream__steps_total=10)
    assert figures(old, new).steps_per_s == 5.0


def test_no_observation_has_no_quantile():
    assert quantile((), 0.5) is None
    assert quantile(((1.0, 0.0), (float("inf"), 0.0)), 0.5) is None


@pytest.mark.parametrize(("share", "value"), [(0.5, 1.0), (0.25, 0.5), (0.75, 1.5), (0.99, 2.0)])
def test_quantiles_lie_within_their_bucket(share, value):
    buckets = ((1.0, 4.0), (2.0, 7.0), (float("inf"), 8.0))
    expected = {0.75: 1.0 + 2 / 3}.get(share, value)
    assert quantile(buckets, share) == pytest.approx(expected)
