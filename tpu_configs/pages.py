"""How many pages of what size a deployment's sequences hold, as its engine keeps them. Imports no JAX."""

from dataclasses import dataclass

from kv.layer_sets import Reach, choose_sets, tokens_ahead
from tpu_configs.deployment import Deployment
from tpu_configs.sizes import Sizes


@dataclass(frozen=True, slots=True)
class HeldPages:
    """Of one replica."""

    page_bytes: int
    """Of one page on one device: of all layers, or of those of one set (`kv.layer_sets`)."""
    num_layers: int
    """Whose tokens a page holds."""
    prefilling: Reach
    decoding: Reach

    @classmethod
    def of(cls, deployment: Deployment) -> "HeldPages":
        settings, model = deployment.settings, deployment.model
        sets = choose_sets(model.windows, settings.max_seq_len, settings.page_size)
        windows, size = ((model.window,), model.num_layers) if sets is None else (sets.windows, sets.size)
        of_all = Sizes.of(deployment).kv_token_bytes * settings.page_size
        size_and_ahead = settings.page_size, tokens_ahead(settings.chunk_tokens, settings.decode_steps, 0)
        return cls(
            of_all // model.num_layers * size,
            size,
            Reach(windows, *size_and_ahead),
            Reach(windows, settings.page_size, tokens_ahead(0, settings.decode_steps, 0)),
        )

    def most(self, tokens: int) -> int:
        """That a sequence of so many tokens holds at any time: while it prefills."""
        return self.prefilling.num_held(tokens)

    def num_held(self, tokens: int) -> int:
        """That a sequence of so many tokens holds while it decodes."""
        return self.decoding.num_held(tokens)

    def token_bytes(self, context: float) -> float:
        """Of keys and values of a decoding sequence of so many tokens, of which not all of the last page are there."""
        reach, per_token = self.decoding, self.page_bytes / self.decoding.page_size
        most = (float("inf") if w is None else reach.most(w, 1 << 62) * reach.page_size for w in reach.windows)
        return per_token * sum(min(context, one) for one in most)
