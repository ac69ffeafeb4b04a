"""The HTTP front: the OpenAI API, admission, streaming and metrics."""
