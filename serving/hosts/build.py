"""Builds an engine over the devices of several hosts: on host 0 with the thread that leads, elsewhere to follow."""

import time

from model.card import ModelCard
from serving.config import EngineConfig, ReplicaConfig
from serving.engine.api import EngineLoop
from serving.engine.build import build_engine, load_engine
from serving.engine.grammar import GrammarCompiler
from serving.engine.loop import take_in
from serving.errors import ConfigError
from serving.hosts import fingerprint
from serving.hosts.follower import Follower
from serving.hosts.join import jax_address
from serving.hosts.leader import Hosts, Progress
from serving.process import spare_the_collector
from sharding.hosts import connect

CONNECTED, READY = "connected", "ready"


def build_leader(config: EngineConfig, progress: Progress, hosts: Hosts) -> tuple[EngineLoop, ModelCard]:
    """Of host 0: ready when all hosts are. Raises what `build_engine` does, and ConfigError or EngineFailed with the
    name of a host that is late, lost or has loaded something else."""
    began = time.monotonic()
    _connect(hosts.config, progress)
    hosts.until(CONNECTED, hosts.config.join_s, progress)
    loop, card = build_engine(config, progress, hosts)
    mine = fingerprint.of_model(card, loop.max_seq_len, loop.load.total_pages)
    # All do the same work: who takes twice as long, and the time that starting may take, is not just slow.
    patience_s = hosts.config.join_s + time.monotonic() - began
    for host, theirs in hosts.until(READY, patience_s, progress).items():
        if different := fingerprint.difference(mine, theirs):
            raise ConfigError(f"{hosts.name(host)} has loaded something else than host 0: {different}.")
    return loop, card


def follow(config: EngineConfig, replica: ReplicaConfig, progress: Progress, follower: Follower) -> None:
    """Of another host: load the model and take host 0's steps, without end. Raises what `build_engine` does, and
    whatever a step raises."""
    follower.say(CONNECTED, _connect(replica, progress))
    engine, card = load_engine(config, progress)
    grammars = GrammarCompiler(card.text.tokenizer_json, engine.vocab_size, card.generation.eos_token_ids)
    engine.digest = 0
    spare_the_collector()
    follower.say(READY, fingerprint.of_model(card, engine.max_seq_len, engine.load.total_pages))
    progress("ready; host 0 leads")
    for inputs in follower.inputs(grammars.restore):
        for command in inputs.commands:
            take_in(engine, command)
        engine.step(inputs.now, inputs.took_s)
        follower.say("digest", engine.digest)


def _connect(replica: ReplicaConfig, progress: Progress) -> int:
    progress(f"connecting the devices of {replica.num_processes} hosts")
    return connect(jax_address(replica), replica.num_processes, replica.process_id, replica.join_s)
