"""Names of the logical axes of parameters, and the dimension letters that array names end in.

The model only *names* its axes; `sharding.rules` decides which mesh axis each one is split over.

Letters, used as suffixes (`logits_BV`) throughout the project:

    B  slots (rows of the decode batch)      D  embed width          V  vocabulary
    T  tokens of one step, flat              F  MLP width            P  pages in the pool
    S  sequences or query tiles of a step    N  query heads          J  pages per sequence
    Q  query tokens per tile                 K  key/value heads      G  tokens per page
    U  key tokens                            H  head dim             L  layers
    R  rows of one step                      E  edits per slot       X  log-probabilities per row
    A  heads of one KV group: its queries, its key and its value     C  parts of a weight: gate and up of a gated MLP
    Z  experts                               Y  ranks of all adapters, one adapter after the other
    W  sets of layers whose pages are their own (in masks: words of 32 tokens)
"""

LAYERS = "layers"
EMBED = "embed"
MLP = "mlp"
HEADS = "heads"
KV_HEADS = "kv_heads"
HEAD_DIM = "head_dim"
GROUP = "group"
PAIR = "pair"
VOCAB = "vocab"
EXPERTS = "experts"
RANK = "rank"

ALL = (LAYERS, EMBED, MLP, HEADS, KV_HEADS, HEAD_DIM, GROUP, PAIR, VOCAB, EXPERTS, RANK)
