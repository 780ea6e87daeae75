"""The endpoints that generate text: chat and text completions of OpenAI, and llama-server's own."""
