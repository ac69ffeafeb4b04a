"""What a mesh does in another way than one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.mesh import make_mesh
from sharding.seams import ROWS_AT_ONCE, looked_up_apart
from sharding.spec import MeshSpec

VOCAB, DIM = 24, 4


@pytest.mark.parametrize(("num_tokens", "dtype"), [(5, "float32"), (2 * ROWS_AT_ONCE, "float32"), (5, "int8")])
@pytest.mark.parametrize("axes", [(), ("tensor",), ("expert", "tensor")], ids=str)
def test_tokens_are_looked_up_wherever_they_lie(num_tokens, dtype, axes):
    """The form of accelerators, which a CPU does not run by itself."""
    random = np.random.default_rng(0)
    table_VD = jnp.asarray(random.integers(-128, 128, (VOCAB, DIM)), dtype)
    tokens_T = jnp.asarray(random.integers(0, VOCAB, num_tokens), jnp.int32)
    look_up = looked_up_apart(make_mesh(MeshSpec(expert=2, tensor=2)), axes)
    np.testing.assert_array_equal(jax.jit(look_up)(table_VD, tokens_T), table_VD[tokens_T])
