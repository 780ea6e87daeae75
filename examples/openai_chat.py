"""A streamed conversation with the openai client, printing the reused tokens of each turn.

Usage: python examples/openai_chat.py [URL] (after `pip install openai`)
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
messages = []

for question in ("Hello! My name is Torvan.", "My cat is called Milo.", "What is my cat called?"):
    messages.append({"role": "user", "content": question})
    print(f"> {question}")
    answer = ""
    stream = client.chat.completions.create(
        model="any", messages=messages, stream=True, stream_options={"include_usage": True}, max_tokens=100
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            answer += chunk.choices[0].delta.content
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            print(f"\n  [{cached} of {chunk.usage.prompt_tokens} prompt tokens were cached]\n")
    messages.append({"role": "assistant", "content": answer})
