#!/bin/sh
# The same conversation twice as long: the second request only pays for what is new.
# Usage: examples/curl.sh [URL]
set -eu
url=${1:-http://127.0.0.1:8080}

ask() {
    curl -sS --fail-with-body "$url/v1/chat/completions" -H 'Content-Type: application/json' -d "$1"
    echo
}

# Streamed: one `data:` line per piece of text, usage and timings at the end.
ask '{"stream": true, "stream_options": {"include_usage": true}, "max_tokens": 60, "messages": [
    {"role": "user", "content": "Hello! My cat is called Milo."}]}'

# Not streamed, and told to stay out of the cache.
ask '{"cache_prompt": false, "temperature": 0, "max_tokens": 60, "messages": [
    {"role": "user", "content": "Hello! My cat is called Milo."}]}'

# What the server holds: slots, and the tokens whose KV they keep.
curl -sS "$url/slots"
echo
