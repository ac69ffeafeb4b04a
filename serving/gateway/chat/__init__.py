"""The short form of chats: the same answers in the fewest words, over SSE and WebSocket."""
