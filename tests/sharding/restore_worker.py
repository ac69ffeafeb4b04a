"""One of several hosts that restore a checkpoint: `python restore_worker.py PATH COORDINATOR HOSTS INDEX`.

Prints as JSON the bytes that it read meanwhile, those of the parts that it holds, and the sum of its numbers, of which
each is counted on one host.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from sharding import checkpoint
from sharding.hosts import connect
from sharding.mesh import make_mesh
from sharding.params import abstract_params
from sharding.rules import choose_rules
from sharding.spec import MeshSpec


def bytes_read():
    """By this process, from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


def main(path, address, num_hosts, index):
    connect(address, int(num_hosts), int(index), 60)
    spec = MeshSpec(tensor=int(num_hosts))
    config = checkpoint.read_card(path).config
    abstract = abstract_params(config, make_mesh(spec), choose_rules(config, spec), "float32")
    checkpoint.saved_dtype(path)  # what is imported late is imported now
    before = bytes_read()
    leaves = jax.tree.leaves(checkpoint.load(path, abstract, verify=False))
    read = bytes_read() - before
    shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
    total = sum(float(np.sum(np.asarray(shard.data, np.float64))) for shard in shards if shard.replica_id == 0)
    print(json.dumps({"read": read, "held": sum(shard.data.nbytes for shard in shards), "total": total}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
