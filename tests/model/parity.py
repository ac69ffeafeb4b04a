"""How far the decoder's logits are from those of Hugging Face transformers, family by family, on the golden models.

python -m tests.model.parity
"""

import json
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from model.attention import dense_attention
from model.convert import convert
from model.families import read_config
from model.foreign import ForeignModel
from model.hf_folder import read_hf_folder
from model.tree import Params
from sharding.mesh import make_mesh
from sharding.params import abstract_params, bind, take_layers_apart
from sharding.rules import choose_rules
from sharding.spec import MeshSpec

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = tuple(sorted(path.name for path in (GOLDEN / "families").iterdir()))


def golden_folder(name: str, scratch: Path) -> Path:
    """A copy of a golden family as a folder that can be read, with the tokenizer of another model."""
    folder = shutil.copytree(GOLDEN / "families" / name, scratch / name)
    shutil.copy(GOLDEN / "tiny_tied" / "tokenizer.json", folder)
    return folder


def worst_difference(name: str, scratch: Path, *, apart: bool = False, tensor: int = 1) -> float:
    """The largest difference of a logit over all prompts, with layers scanned or apart, over `tensor` devices."""
    model = read_hf_folder(golden_folder(name, scratch))
    params = _on_mesh(model, MeshSpec(tensor=tensor))
    return max(_differences(model, take_layers_apart(params) if apart else params, name))


def _on_mesh(model: ForeignModel, spec: MeshSpec) -> Params:
    abstract = abstract_params(model.config, make_mesh(spec), choose_rules(model.config, spec), "float32")
    return jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), convert(model), abstract)


def _differences(model: ForeignModel, params: Params, name: str) -> list[float]:
    decoder = bind(model.config, params)

    @jax.jit
    def logits(tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[0])
        return decoder(tokens, positions, dense_attention(jnp.zeros_like(positions), positions))[0]

    golden = np.load(GOLDEN / "families" / name / "logits.npz")
    longest = max(len(golden[key]) for key in golden.files)

    def difference(index: int) -> float:
        prompt, expected = golden[f"prompt_{index}"], golden[f"logits_{index}"]
        padded = np.pad(prompt, (0, longest - len(prompt)))  # behind the prompt, where nobody looks
        return float(np.abs(np.asarray(logits(padded))[: len(prompt)] - expected).max())

    return [difference(index) for index in range(len(golden.files) // 2)]


def main() -> None:
    print("| `model_type` | what it has beside Llama | largest difference of a logit |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for name in FAMILIES:
            print(f"| `{name}` | {_features(name)} | {worst_difference(name, Path(scratch)):.1e} |")


def _features(name: str) -> str:
    """What of the decoder its golden model uses."""
    _, config = read_config(json.loads((GOLDEN / "families" / name / "config.json").read_text()))
    has = {
        f"{config.num_experts} experts, {config.experts_per_token} per token": config.num_experts,
        "a window in every layer": config.window,
        "a window in some layers": config.windows and config.window is None,
        "a rope of its own for them": config.local_rope_theta,
        "soft caps": config.attention_softcap,
        "biases": config.qkv_bias,
        "norms on queries and keys": config.qk_norm,
        "norms behind attention and MLP": config.sandwich_norms,
    }
    return ", ".join(feature for feature, is_used in has.items() if is_used) or "nothing"


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # the golden numbers are a CPU's; libtpu complains where no TPU is
    main()
