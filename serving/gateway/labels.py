"""Labels and hints that change no token of an answer: understood as OpenAI documents them, and checked."""

from typing import Annotated, Any, Literal

from pydantic import Field

from serving.gateway.at_most import AtMost
from serving.gateway.strict import Body

ModelName = Annotated[str, Field(max_length=512)]
LabelKey = Annotated[str, Field(max_length=64)]
LabelValue = Annotated[str, Field(max_length=512)]


class Labels(Body):
    user: str | None = None
    metadata: Annotated[dict[LabelKey, LabelValue], AtMost(16, "keys in metadata")] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    safety_identifier: Annotated[str, Field(max_length=64)] | None = None
    prompt_cache_key: str | None = None
    """Equal beginnings are found without it."""
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
