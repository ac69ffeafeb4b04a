"""OpenAI's Responses API, in front of the same chats."""
