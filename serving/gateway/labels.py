"""Labels and hints that change no token of an answer: understood as OpenAI documents them, and checked."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.gateway.at_most import AtMost

ModelName = Annotated[str, Field(max_length=512)]
LabelKey = Annotated[str, Field(max_length=64)]
LabelValue = Annotated[str, Field(max_length=512)]


class Labels(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    user: str | None = None
    metadata: Annotated[dict[LabelKey, LabelValue], AtMost(16, "keys in metadata")] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    safety_identifier: Annotated[str, Field(max_length=64)] | None = None
    prompt_cache_key: str | None = None
    """Equal beginnings are found without it."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
