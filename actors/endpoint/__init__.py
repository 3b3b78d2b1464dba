"""Chats over HTTP, as OpenAI's clients ask for them, on an engine that its owner's loop advances."""
