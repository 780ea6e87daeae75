"""OpenAI's Responses API: replies, the events of streams, and the store of earlier responses."""
