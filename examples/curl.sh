#!/bin/sh
# Requests with curl: streamed, without the cache, and the state of the slots.
# Usage: examples/curl.sh [URL]
set -eu
url=${1:-http://127.0.0.1:8080}

ask() {
    curl -sS --fail-with-body "$url/v1/chat/completions" -H 'Content-Type: application/json' -d "$1"
    echo
}

# Streamed: one `data:` line per part of the text, usage and timings at the end.
ask '{"stream": true, "stream_options": {"include_usage": true}, "max_tokens": 60, "messages": [
    {"role": "user", "content": "Hello! My cat is called Milo."}]}'

# Not streamed, without reading or filling the cache.
ask '{"cache_prompt": false, "temperature": 0, "max_tokens": 60, "messages": [
    {"role": "user", "content": "Hello! My cat is called Milo."}]}'

# The slots, and how many tokens of KV each holds.
curl -sS "$url/slots"
echo
