"""Everything that turns text into token ids whose KV may be cached."""
